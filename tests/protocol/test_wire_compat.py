#!/usr/bin/python3
"""scripts/wire-compat on copies of the protocol with one change each: what breaks somebody is refused in one line that names it, the rest is not."""

import contextlib
import importlib.machinery
import importlib.util
import io
import pathlib
import re
import shutil
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def load_checker():
    loader = importlib.machinery.SourceFileLoader("wire_compat", str(ROOT / "scripts/wire-compat"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("wire_compat", loader))
    loader.exec_module(module)
    return module


checker = load_checker()


class Compat(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.proto = pathlib.Path(self.scratch.name, "proto")
        shutil.copytree(ROOT / "proto/muster", self.proto / "muster")

    def tearDown(self):
        self.scratch.cleanup()

    def change(self, file, pattern, replacement):
        path = self.proto / "muster/v1" / file
        text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
        self.assertEqual(count, 1, f"{pattern} is there {count} times")
        path.write_text(text)

    def judge(self):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = checker.main(["--proto", str(self.proto)])
        self.assertEqual(code, 1 if output.getvalue() else 0)
        return output.getvalue()

    def refused(self, *fragments):
        output = self.judge()
        self.assertEqual(output.count("\n"), 1, output)
        for fragment in fragments:
            self.assertIn(fragment, output)

    def test_the_protocol_is_the_released_one(self):
        self.assertEqual(self.judge(), "")

    def test_a_removed_field(self):
        self.change("job.proto", r"^  uint64 eval_step = 15;.*\n", "")
        self.refused("muster.v1.Job.eval_step (field 15) is gone")

    def test_a_removed_field_is_refused_also_when_it_is_reserved(self):
        self.change("job.proto", r"^  uint64 eval_step = 15;.*$", "  reserved 15;")
        self.refused("muster.v1.Job.eval_step (field 15) is gone")

    def test_a_renumbered_field(self):
        self.change("job.proto", r"uint64 eval_step = 15;", "uint64 eval_step = 99;")
        self.refused("muster.v1.Job.eval_step had number 15 and has 99")

    def test_a_retyped_field(self):
        self.change("service.proto", r"(message GetTimingsRequest \{(?:.*\n)*?  )uint32 per_worker", r"\1uint64 per_worker")
        self.refused("muster.v1.GetTimingsRequest.per_worker (field 3) was 'per_worker uint32' and is 'per_worker uint64'")

    def test_a_field_that_becomes_repeated(self):
        self.change("job.proto", r"^  WorkerPolicy workers = 7;", "  repeated WorkerPolicy workers = 7;")
        self.refused("muster.v1.JobSpec.workers (field 7)", "repeated")

    def test_a_field_that_leaves_its_oneof(self):
        self.change("job.proto", r"  oneof optional_seed \{\n(    uint64 seed = 11;.*\n)  \}", r"\1")
        self.refused("muster.v1.JobSpec.seed (field 11)", "oneof optional_seed")

    def test_a_renamed_field(self):
        self.change("job.proto", r"uint64 eval_step = 15;", "uint64 evaluation_step = 15;")
        self.refused("muster.v1.Job.eval_step (field 15) is now called evaluation_step")

    def test_a_removed_method(self):
        self.change("service.proto", r"^  rpc ListCheckpoints\(.*\n", "")
        output = self.judge().splitlines()  # and with it what only it mentioned
        self.assertIn("wire-compat: muster.v1.MusterService.ListCheckpoints is gone; released methods stay as they are", output)
        self.assertTrue(all("ListCheckpoints" in line or "muster.v1.Checkpoint." in line for line in output), output)

    def test_a_method_that_no_longer_streams(self):
        self.change("service.proto", r"returns \(stream WatchEventsResponse\)", "returns (WatchEventsResponse)")
        self.refused("muster.v1.MusterService.WatchEvents was (muster.v1.WatchEventsRequest) returns (stream ")

    def test_an_enum_value_that_is_removed_or_renumbered(self):
        self.change("job.proto", r"^  JOB_STATE_CANCELLED = 5;.*\n", "")
        self.refused("muster.v1.JobState.JOB_STATE_CANCELLED (value 5) is gone")

    def test_a_reserved_number_is_used_again(self):
        self.change("records.proto", r"^  reserved 5;\n", "  uint32 other = 5;\n")
        self.refused("muster.v1.GenerationRecord: 5 is reserved and used again (other uint32)")

    def test_a_reserved_name_is_used_again(self):
        self.change("records.proto", r'^  reserved "mesh";\n', "  uint32 mesh = 90;\n")
        self.refused("muster.v1.GenerationRecord: mesh is reserved and used again")

    def test_what_was_reserved_stays_so(self):
        self.change("records.proto", r"^  reserved 5;\n", "")
        self.refused("muster.v1.GenerationRecord: 5 is no longer reserved")

    def test_a_stored_field_that_is_removed(self):
        self.change("records.proto", r"^  uint64 next_checkpoint = 5;\n", "")
        self.refused("muster.v1.JobRecord.next_checkpoint (field 5) is gone")

    def test_a_failure_that_tells_less(self):
        self.change("error.proto", r"^  string domain = 2;.*\n", "")
        self.refused("muster.v1.ErrorInfo.domain (field 2) is gone")

    def test_additions_are_welcome(self):
        self.change("job.proto", r"^(  uint64 eval_step = 15;.*\n)", r"\1  uint64 eval_sequences = 200;\n")
        self.change("job.proto", r"^(  JOB_STATE_CANCELLED = 5;.*\n)", r"\1  JOB_STATE_PAUSED = 6;\n")
        self.change("service.proto", r"^(  rpc ListCheckpoints\(.*\n)", r"\1  rpc ListMore(ListCheckpointsRequest) returns (ListCheckpointsResponse);\n")
        self.change("session.proto", r"^  uint64 pid = 9;\n", "")  # the workers' stream has a version of its own
        self.assertEqual(self.judge(), "")


class Documented(unittest.TestCase):
    def test_every_reason_and_every_method_is_in_the_documentation(self):
        text = (ROOT / "docs/protocol.md").read_text()
        words = re.findall(r'^    \[MU_REASON_\w+\] = \{"(\w+)"', (ROOT / "common/reason.c").read_text(), flags=re.MULTILINE)
        methods = re.findall(r"^  rpc (\w+)", (ROOT / "proto/muster/v1/service.proto").read_text(), flags=re.MULTILINE)
        self.assertGreater(len(words), 10)
        clients = {"CANNOT_CONNECT", "CONNECTION_LOST"}  # never on the wire
        self.assertEqual([word for word in [*words, *methods] if word not in clients and f"`{word}" not in text], [])


if __name__ == "__main__":
    unittest.main()
