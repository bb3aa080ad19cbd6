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
mkdir "$dir/scripts" && cp scripts/gpu-check.curve "$dir/scripts" && cp -r bench "$dir"
sed 's/^bundle_mib_max=.*/bundle_mib_max=1/' scripts/gpu-check >"$dir/scripts/gpu-check" && chmod +x "$dir/scripts/gpu-check"
! "$dir/scripts/gpu-check" --bundle "$dir/large" --build "$1" --emulated 2>"$dir/err" || fail "a bundle may be of any size"
grep -q 'MiB, and 1 are allowed' "$dir/err" || fail "its size is not told: $(cat "$dir/err")"
"$dir/b/run" | tee "$dir/out" || fail "a part failed"
for part in kernels undisturbed leaves resume curve speed_124m speed_1558m; do
  grep -q "\"part\":\"$part\",\"result\":\"ok\"" "$dir/b/results.json" || fail "$part is not ok: $(cat "$dir/b/results.json")"
done
for measure in curve copy step kernel checkpoint_stall; do
  grep -q "\"measure\":\"$measure\"" "$dir/b/results.json" || fail "no $measure was measured: $(cat "$dir/b/results.json")"
done
python3 -m json.tool "$dir/b/results.json" >/dev/null || fail "results.json is no JSON"

printf '#!/bin/sh\necho broken; exit 1\n' >"$dir/b/bin/muster-worker" # ends at once: no job can finish, and each part has 4 s
sed -i 's/^parts=.*/parts=(undisturbed:1 sanitizer:1)/' "$dir/b/run"
code=0
"$dir/b/run" >"$dir/out" || code=$?
[ $code = 1 ] || fail "exit $code although a part failed"
tail -n 2 "$dir/out" | head -n 1 | grep -q '^undisturbed *failed .*not done in 4 s' || fail "the failed part is not in the table: $(tail -n 3 "$dir/out")"
tail -n 1 "$dir/out" | grep -q '^sanitizer *left out' || fail "the part after it did not run: $(tail -n 1 "$dir/out")"
