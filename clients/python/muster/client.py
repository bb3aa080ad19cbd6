"""The calls. Threads may share a client."""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any, Iterator, List, Optional, Tuple

import grpc

from .errors import EventsCompacted, from_rpc_error
from .timings import Timing, Timings
from .v1 import job_pb2, service_pb2

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["MusterService"]
_PAUSE_S = 0.1  # before a call is repeated; doubles up to:
_PAUSE_MAX_S = 1.0
_PAGE = 1000
_CONNECTING_S = 5.0  # longer than an attempt to connect: a watch that lasted so long had found a coordinator
_JOB_ENDS = ("job_finished", "job_failed", "job_cancelled")
_CHECKPOINT_ENDS = ("checkpoint_committed", "checkpoint_failed")


@dataclasses.dataclass(frozen=True)
class Tls:
    """Files in PEM form for mutual TLS, as `muster cert` makes them."""

    ca: str
    cert: str
    key: str

    def credentials(self) -> grpc.ChannelCredentials:
        def read(path: str) -> bytes:
            with open(path, "rb") as file:
                return file.read()
        return grpc.ssl_channel_credentials(read(self.ca), read(self.key), read(self.cert))


class _Stubs:
    """One callable per method of the service, as its descriptor says."""

    def __init__(self, channel: grpc.Channel):
        for method in _SERVICE.methods:
            request = getattr(service_pb2, method.input_type.name)
            response = getattr(service_pb2, method.output_type.name)
            is_stream = method.name == "WatchEvents"
            make = channel.unary_stream if is_stream else channel.unary_unary
            setattr(self, method.name, make(f"/{_SERVICE.full_name}/{method.name}", request_serializer=request.SerializeToString,
                                            response_deserializer=response.FromString))


class Client:
    """A connection to a coordinator.

    Calls wait up to `timeout` seconds. While no coordinator is there, or it stops, they are repeated within that time; a change
    carries a `request_id`, so it is made once however often it is sent. Failures raise MusterError.
    """

    def __init__(self, address: str = "127.0.0.1:7070", tls: Optional[Tls] = None, timeout: float = 10.0):
        self.timeout = timeout
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 1000)]
        self._channel = (grpc.secure_channel(address, tls.credentials(), options=options) if tls
                         else grpc.insecure_channel(address, options=options))
        self._stubs = _Stubs(self._channel)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # ---- calls ----

    def _call(self, method: str, request: Any) -> Any:
        deadline, pause_s = time.monotonic() + self.timeout, _PAUSE_S
        while True:
            try:
                return getattr(self._stubs, method)(request, timeout=max(0.001, deadline - time.monotonic()))
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() + pause_s >= deadline:
                    raise failure from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _change(self, method: str, request: Any, request_id: Optional[bytes]) -> Any:
        request.request_id = request_id or uuid.uuid4().bytes
        return self._call(method, request)

    def _pages(self, method: str, request: Any, field: str) -> Iterator[Any]:
        while True:
            response = self._call(method, request)
            yield from getattr(response, field)
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token

    # ---- jobs ----

    def submit(self, spec: job_pb2.JobSpec, expected_revision: int = 0, request_id: Optional[bytes] = None,
               preflight: bool = False) -> Tuple[job_pb2.Job, bool]:
        """Adds a job; with `preflight` its workers are measured before it begins. Returns it, and whether the same job was
        there already."""
        request = service_pb2.SubmitJobRequest(spec=spec, expected_revision=expected_revision, preflight=preflight)
        response = self._change("SubmitJob", request, request_id)
        return response.job, response.existed

    def job(self, name: str) -> job_pb2.Job:
        return self._call("GetJob", service_pb2.GetJobRequest(name=name)).job

    def jobs(self) -> List[job_pb2.Job]:
        return list(self._pages("ListJobs", service_pb2.ListJobsRequest(page_size=_PAGE), "jobs"))

    def cancel(self, name: str, reason: str = "", expected_revision: int = 0, request_id: Optional[bytes] = None) -> None:
        """Ends a job. Its checkpoints stay."""
        request = service_pb2.CancelJobRequest(name=name, reason=reason, expected_revision=expected_revision)
        self._change("CancelJob", request, request_id)

    def scale(self, job: str, min: int = 0, max: int = 0, spares: Optional[int] = None, expected_revision: int = 0,
              request_id: Optional[bytes] = None) -> job_pb2.Job:
        """Changes how many workers a job takes, from the next generation on; what is not given stays. Returns the job."""
        request = service_pb2.ScaleJobRequest(job=job, min=min, max=max, expected_revision=expected_revision)
        if spares is not None:
            request.spares = spares
        return self._change("ScaleJob", request, request_id).job

    def amend(self, job: str, expected_revision: int = 0, request_id: Optional[bytes] = None, **fields) -> job_pb2.Job:
        """Changes a job from a step on. Fields as in Amendment: lr, min_lr, warmup, steps, checkpoint_every, checkpoint_every_auto,
        checkpoint_keep, checkpoint_keep_every, skip_first and skip_count, at_step. Returns the job."""
        request = service_pb2.AmendJobRequest(job=job, amendment=job_pb2.Amendment(**fields), expected_revision=expected_revision)
        return self._change("AmendJob", request, request_id).job

    def roll_back(self, job: str, checkpoint: int, by: str = "", expected_revision: int = 0, request_id: Optional[bytes] = None,
                  **fields) -> job_pb2.Job:
        """Sets a job back to a checkpoint: what was done after it is undone. Fields as for amend(), from its step on. Returns the job."""
        amendment = job_pb2.Amendment(roll_back_to=checkpoint, **fields)
        request = service_pb2.AmendJobRequest(job=job, amendment=amendment, by=by, expected_revision=expected_revision)
        return self._change("AmendJob", request, request_id).job

    def branch(self, job: str, checkpoint: int, name: str, checkpoint_path: str = "", by: str = "", expected_revision: int = 0,
               request_id: Optional[bytes] = None, **fields) -> job_pb2.Job:
        """Begins the job `name` with a checkpoint of `job`. Fields as for amend(). Returns the new job."""
        request = service_pb2.BranchJobRequest(job=job, checkpoint=checkpoint, name=name, checkpoint_path=checkpoint_path, by=by,
                                               expected_revision=expected_revision)
        if fields:
            request.amendment.CopyFrom(job_pb2.Amendment(**fields))
        return self._change("BranchJob", request, request_id).job

    def wait(self, job: str, timeout: Optional[float] = None) -> job_pb2.Job:
        """Waits until the job is over, and returns it. TimeoutError after `timeout` seconds (None: never)."""
        deadline, after = _deadline(timeout), 0
        while True:
            now = self.job(job)
            if now.phase == job_pb2.JOB_PHASE_OVER:
                return now
            # its end will be told by an event after the revision that was just read
            after = self._first(_JOB_ENDS, max(after, now.revision), job, deadline)

    # ---- workers ----

    def workers(self, job: str = "") -> List[job_pb2.Worker]:
        return list(self._pages("ListWorkers", service_pb2.ListWorkersRequest(job=job, page_size=_PAGE), "workers"))

    def drain(self, worker: str, reason: str, request_id: Optional[bytes] = None, expected_revision: Optional[int] = None) -> None:
        """The worker leaves at the next boundary and may not come back before undrain()."""
        request = service_pb2.DrainWorkerRequest(worker=worker, reason=reason, expected_revision=expected_revision)
        self._change("DrainWorker", request, request_id)

    def undrain(self, worker: str, request_id: Optional[bytes] = None, expected_revision: Optional[int] = None) -> None:
        """Lifts a drain or a quarantine."""
        self._change("UndrainWorker", service_pb2.UndrainWorkerRequest(worker=worker, expected_revision=expected_revision), request_id)

    # ---- nodes: expected_revision is Node.revision; 0: nothing is ordered of it; None: whatever is ----

    def nodes(self) -> List[job_pb2.Node]:
        return list(self._pages("ListNodes", service_pb2.ListNodesRequest(page_size=_PAGE), "nodes"))

    def cordon(self, node: str, reason: str, by: str = "", expected_revision: Optional[int] = None, request_id: Optional[bytes] = None) -> None:
        """Workers of the host that hold nothing get no rank."""
        self._order(job_pb2.NODE_ORDER_CORDON, request_id, node=node, reason=reason, by=by, expected_revision=expected_revision)

    def drain_node(self, node: str, reason: str, by: str = "", deadline_s: int = 0, expected_revision: Optional[int] = None,
                   request_id: Optional[bytes] = None) -> None:
        """All workers of the host leave at the next boundary, or are given up after `deadline_s`."""
        self._order(job_pb2.NODE_ORDER_DRAIN, request_id, node=node, reason=reason, by=by, deadline_s=deadline_s,
                    expected_revision=expected_revision)

    def resume(self, node: str, by: str = "", expected_revision: Optional[int] = None, request_id: Optional[bytes] = None) -> None:
        """Lifts what is ordered of a host."""
        self._order(job_pb2.NODE_ORDER_RESUME, request_id, node=node, by=by, expected_revision=expected_revision)

    def _order(self, order: int, request_id: Optional[bytes], **fields: Any) -> None:
        self._change("OrderNode", service_pb2.OrderNodeRequest(order=order, **fields), request_id)

    # ---- checkpoints and timings ----

    def checkpoint(self, job: str, expected_revision: int = 0, request_id: Optional[bytes] = None) -> int:
        """Orders a checkpoint at the next boundary. Returns its number; wait_checkpoint() waits for its end."""
        request = service_pb2.TriggerCheckpointRequest(job=job, expected_revision=expected_revision)
        return self._change("TriggerCheckpoint", request, request_id).number

    def wait_checkpoint(self, job: str, number: int, timeout: Optional[float] = None) -> job_pb2.Checkpoint:
        """Waits until a checkpoint is committed, and returns it. LookupError when it was given up."""
        deadline = _deadline(timeout)
        after = next((event.number for event in self.watch(follow=False, newest=1)), 0)  # before the list is read
        while True:
            found = next((one for one in self.checkpoints(job) if one.number == number), None)
            if found is None or found.state not in (job_pb2.CHECKPOINT_STATE_INTENT, job_pb2.CHECKPOINT_STATE_COMMITTED):
                raise LookupError(f"checkpoint {number} of job {job} was given up")
            if found.state == job_pb2.CHECKPOINT_STATE_COMMITTED:
                return found
            after = self._first(_CHECKPOINT_ENDS + _JOB_ENDS, after, job, deadline)

    def checkpoints(self, job: str) -> List[job_pb2.Checkpoint]:
        return list(self._pages("ListCheckpoints", service_pb2.ListCheckpointsRequest(job=job, page_size=_PAGE), "checkpoints"))

    def timings(self, job: str, worker: str = "", last: int = 1) -> Timings:
        """The newest `last` reports (at most 64) of each worker of a job, or of one."""
        request = service_pb2.GetTimingsRequest(job=job, worker=worker, per_worker=last, page_size=_PAGE)
        return Timings(Timing.from_pb(pb) for pb in self._pages("GetTimings", request, "timings"))

    def goodput(self, job: str) -> List[job_pb2.Account]:
        """Where the time of each worker of a job went: every second is in one class of `seconds`."""
        return list(self._pages("GetGoodput", service_pb2.GetGoodputRequest(job=job, page_size=_PAGE), "accounts"))

    # ---- events ----

    def watch(self, job: str = "", after: int = 0, follow: bool = True, newest: int = 0) -> Iterator[job_pb2.Event]:
        """Past events after number `after`, then each new one as it happens, each once and in order.

        Goes on by itself after a restart of the coordinator, and after having been cut off for reading too slowly.
        EventsCompacted: what comes next is no longer kept.
        """
        return self._watch(job, after, follow, newest, None)

    def _watch(self, job: str, after: int, follow: bool, newest: int, deadline: Optional[float]) -> Iterator[job_pb2.Event]:
        lost_since: Optional[float] = None
        while True:
            began = time.monotonic()
            request = service_pb2.WatchEventsRequest(after_event=after, job=job, follow=follow, newest=newest)
            call = self._stubs.WatchEvents(request, timeout=None if deadline is None else max(0.001, deadline - began))
            try:
                for response in call:
                    after, newest, lost_since = response.event.number, 0, None
                    yield response.event
                return
            except grpc.RpcError as error:
                failure, now = from_rpc_error(error), time.monotonic()
                if deadline is not None and now >= deadline:
                    raise TimeoutError("the event did not come in time") from None
                if lost_since is None or now - began > _CONNECTING_S:
                    lost_since = now
                passing = error.code() == grpc.StatusCode.UNAVAILABLE or failure.reason == "WATCH_TOO_SLOW"
                if not passing or now - lost_since > self.timeout:
                    raise failure from None
            finally:
                call.cancel()
            time.sleep(_PAUSE_S)

    def _first(self, kinds: Tuple[str, ...], after: int, job: str, deadline: Optional[float]) -> int:
        """The number of the first such event; if events are missing, of the last one that is."""
        try:
            return next(event.number for event in self._watch(job, after, True, 0, deadline) if event.kind in kinds)
        except EventsCompacted as gap:
            return gap.after_event


def _deadline(timeout: Optional[float]) -> Optional[float]:
    return None if timeout is None else time.monotonic() + timeout
