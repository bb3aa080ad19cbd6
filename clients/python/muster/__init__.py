"""Client of musterd: submit, watch, scale, checkpoint, drain jobs, and read where their time goes.

    import muster

    with muster.Client("127.0.0.1:7070") as client:
        client.submit(spec)
        for event in client.watch(job=spec.name):
            print(event.number, event.kind, event.text)
"""

from .client import Client, Tls
from .errors import (AlreadyExists, Conflict, EventsCompacted, InvalidRequest, MusterError, NotFound, Refused, RevisionChanged,
                     Unavailable)
from .timings import Timing, Timings
from .v1.job_pb2 import Checkpoint, Event, Job, JobSpec, Worker

__all__ = ["AlreadyExists", "Checkpoint", "Client", "Conflict", "Event", "EventsCompacted", "InvalidRequest", "Job", "JobSpec",
           "MusterError", "NotFound", "Refused", "RevisionChanged", "Timing", "Timings", "Tls", "Unavailable", "Worker"]
