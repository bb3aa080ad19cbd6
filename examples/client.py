#!/usr/bin/env python3
"""Submits a job to a Muster coordinator, follows its events to the end, prints the job and its timings.

    pip install grpcio grpcio-tools
    ./client.py 127.0.0.1:7070 my-job /absolute/path/of/text.txt [STEPS]
"""
import pathlib
import sys
import tempfile
import time
import uuid

import grpc
from grpc_tools import protoc

protos = pathlib.Path(__file__).resolve().parent.parent / "proto"
out = tempfile.mkdtemp()  # stubs are made at run time: nothing generated to keep up to date
files = [f"muster/v1/{name}.proto" for name in ("job", "service")]
if protoc.main(["protoc", f"-I{protos}", f"--python_out={out}", f"--grpc_python_out={out}", *files]):
    sys.exit("protoc failed")
sys.path.insert(0, out)
from muster.v1 import job_pb2 as job, service_pb2 as api, service_pb2_grpc  # noqa: E402

address, name, data = sys.argv[1:4]
steps = int(sys.argv[4]) if len(sys.argv) > 4 else 20
muster = service_pb2_grpc.MusterServiceStub(grpc.insecure_channel(address))

spec = job.JobSpec(
    name=name, steps=steps,
    model=job.ModelSpec(layers=2, heads=2, channels=64, context=64, vocab=256),
    data=job.DataSpec(path=data),
    batch=job.BatchSpec(sequences=8, micro=2),
    optimizer=job.OptimizerSpec(lr=1e-3, min_lr=1e-4))
try:
    # the id makes it safe to send the same request again when the answer is lost: the job is submitted once
    answer = muster.SubmitJob(api.SubmitJobRequest(spec=spec, request_id=uuid.uuid4().bytes), timeout=10)
    print("submitted" if not answer.existed else "was there already:", answer.job.name, answer.job.uid.hex())
    last, result = 0, answer.job
    while result.phase != job.JOB_PHASE_OVER:
        try:
            for event in (r.event for r in muster.WatchEvents(api.WatchEventsRequest(job=name, follow=True, after_event=last))):
                last = event.number
                print(f"event {last:>5} step {event.step:>6} {event.kind:24} {event.text}", flush=True)
                if event.kind in ("job_finished", "job_failed", "job_cancelled"):
                    break  # perhaps of an earlier job of this name: the job itself says
            result = muster.GetJob(api.GetJobRequest(name=name), timeout=10).job
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            time.sleep(0.2)  # the coordinator restarts: go on after the last event, nothing is lost or repeated
    print(f"{result.name}: {job.JobState.Name(result.state)} at step {result.steps_done}, loss {result.result.loss:.4f}, "
          f"weights {result.weights_sha256.hex() or '-'}")
    for t in muster.GetTimings(api.GetTimingsRequest(job=name), timeout=10).timings:
        print(f"  {t.worker}: {t.total_us / t.step_count / 1000:.1f} ms a step, waiting {t.wait_us / t.step_count / 1000:.1f} ms")
except grpc.RpcError as error:
    sys.exit(f"client.py: {error.code().name}: {error.details()}")
