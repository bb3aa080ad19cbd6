"""What a failed call raises: one class per kind of trouble, with the server's typed details."""

from __future__ import annotations

from typing import Dict, Optional, Sequence, Type

import grpc
from google.protobuf.message import DecodeError

from .v1 import error_pb2

_KEY = "grpc-status-details-bin"


class MusterError(Exception):
    """A call failed. `str()` is the server's line for people; the rest is for programs."""

    def __init__(self, code: grpc.StatusCode, text: str, reason: str = "", field: str = "", advice: str = "",
                 retry_after: Optional[float] = None, values: Optional[Dict[str, int]] = None):
        super().__init__(text)
        self.code = code  # of gRPC
        self.reason = reason  # a stable word, see docs/protocol.md: "JOB_UNKNOWN"; the code's name where that says it all
        self.field = field  # which field of the request is wrong; "" if none is
        self.advice = advice  # what to do about it
        self.retry_after = retry_after  # seconds after which the same request may succeed; None: it will not
        self.values = values or {}  # numbers that belong to the reason: {"revision": 7}


class NotFound(MusterError):
    """There is no such job or worker."""


class AlreadyExists(MusterError):
    """A job of that name runs with another specification."""


class InvalidRequest(MusterError):
    """A field is not allowed: `field` says which."""


class Conflict(MusterError):
    """The state does not permit it now."""


class RevisionChanged(MusterError):
    """Somebody else has changed the job since `expected_revision`: read it again and decide anew."""

    @property
    def revision(self) -> int:
        """The job's revision now; 0: there is no such job any more."""
        return self.values.get("revision", 0)


class EventsCompacted(MusterError):
    """Events that were asked for are no longer kept: there is a gap."""

    @property
    def after_event(self) -> int:
        """From here on all events are there: read the present state, then watch with `after` set to this."""
        return self.values.get("after_event", 0)


class Refused(MusterError):
    """A limit, a full disk, or a missing permission."""


class Unavailable(MusterError):
    """No coordinator answered in time. A change may have been made all the same; the same `request_id` tells."""


_CLASSES: Dict[grpc.StatusCode, Type[MusterError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: Conflict,
    grpc.StatusCode.ABORTED: RevisionChanged,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Refused,
    grpc.StatusCode.PERMISSION_DENIED: Refused,
    grpc.StatusCode.UNAUTHENTICATED: Refused,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable,
}


def _details(error: grpc.RpcError) -> Sequence[error_pb2.ErrorDetail]:
    packed = next((value for key, value in error.trailing_metadata() or () if key == _KEY), b"")
    try:
        return error_pb2.ErrorStatus.FromString(packed).details
    except DecodeError:  # not from a coordinator: a proxy, say
        return ()


def from_rpc_error(error: grpc.RpcError) -> MusterError:
    """The exception for what grpc raised, with the details that the server sent."""
    code, text = error.code(), error.details() or ""
    reason, field, advice, retry_after, values = code.name, "", "", None, {}
    for detail in _details(error):
        kind = detail.type_url.rsplit(".", 1)[-1]
        if kind == "ErrorInfo":
            info = error_pb2.ErrorInfo.FromString(detail.value)
            pairs = {pair.key: pair.value for pair in info.metadata}
            reason, advice = info.reason, pairs.pop("advice", "")
            values = {key: int(value) for key, value in pairs.items() if value.isdigit()}
        elif kind == "BadRequest":
            field = error_pb2.ErrorFields.FromString(detail.value).field_violations[0].field
        elif kind == "RetryInfo":
            delay = error_pb2.ErrorRetry.FromString(detail.value).retry_delay
            retry_after = delay.seconds + delay.nanos * 1e-9
    kind = EventsCompacted if reason == "EVENTS_COMPACTED" else _CLASSES.get(code, MusterError)
    return kind(code, text, reason, field, advice, retry_after, values)
