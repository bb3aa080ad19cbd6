#!/usr/bin/env bash
# scripts/gpu-check from bundle to table, with the programs that emulate the GPU. A part that fails is told, and stops no other.
#
#   gpu_check.sh BUILD
set -euo pipefail
cd "$(dirname "$0")/../.."
fail() { echo "FAIL gpu_check: $*"; exit 1; }

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
if [ -x "$1/tests/unit/test_cuda_products_on_device" ]; then # with code for all architectures that are built
  ./scripts/gpu-check --bundle "$dir/real" --build "$1" || fail "no bundle for a real GPU, or too large a one"
fi
./scripts/gpu-check --bundle "$dir/b" --build "$1" --emulated || fail "no bundle"
sed 's/^bundle_mib_max=.*/bundle_mib_max=1/' scripts/gpu-check >"$dir/gpu-check" && chmod +x "$dir/gpu-check"
! "$dir/gpu-check" --bundle "$dir/large" --build "$1" --emulated 2>"$dir/err" || fail "a bundle may be of any size"
grep -q 'MiB, and 1 are allowed' "$dir/err" || fail "its size is not told: $(cat "$dir/err")"
"$dir/b/run" | tee "$dir/out" || fail "a part failed"
[ "$(grep -o '"result":"ok"' "$dir/b/results.json" | wc -l)" = 4 ] || fail "not four parts are ok: $(cat "$dir/b/results.json")"
python3 -m json.tool "$dir/b/results.json" >/dev/null || fail "results.json is no JSON"

printf '#!/bin/sh\necho broken; exit 1\n' >"$dir/b/bin/muster-worker" # ends at once: no job can finish
sed -i 's/^parts=.*/parts=(undisturbed:3 sanitizer:3)/' "$dir/b/run"
code=0
"$dir/b/run" >"$dir/out" || code=$?
[ $code = 1 ] || fail "exit $code although a part failed"
tail -n 2 "$dir/out" | head -n 1 | grep -q '^undisturbed *failed .*not done in 3 s' || fail "the failed part is not in the table: $(tail -n 3 "$dir/out")"
tail -n 1 "$dir/out" | grep -q '^sanitizer *left out' || fail "the part after it did not run: $(tail -n 1 "$dir/out")"
