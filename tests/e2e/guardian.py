"""Kills processes when the one that has started them is gone, however it ended: process ids come one a line, and the end of them is that end.

By pidfds: a number that somebody else has by now does him no harm."""

import contextlib
import os
import signal
import sys

held = []
for line in sys.stdin:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        held.append(os.pidfd_open(int(line)))
for fd in held:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)
