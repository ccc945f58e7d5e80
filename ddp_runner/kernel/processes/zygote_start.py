"""Starts the process that imports torch: where a run needs it, or ahead of all that is judged about the run.

Imports next to nothing, as a launch begins with it. Decides nothing.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.kernel.system.parent_death import marked

if TYPE_CHECKING:
    from collections.abc import Mapping

_MARK_BYTES = 16


class StartedZygote:
    """Our own interpreter with our own module. All three are for whoever takes it over to close."""

    def __init__(self, wanted: str, environment: Mapping[str, str]) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A file in memory that it, and what it imports, writes to.
        self.output = os.memfd_create("zygote")
        # The channel is handed over by number; a session of its own keeps a terminal's Ctrl-C and
        # hang-up with the supervisor, who decides what they mean.
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [
                sys.executable,
                start.__file__,
                "ddp_runner.kernel.rank.zygote",
                str(theirs.fileno()),
                str(os.getpid()),
                wanted,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=dict(environment),
        )
        theirs.close()


class ZygoteAhead:
    """A zygote that imports torch while this process still checks its arguments.

    ``mark`` is that of the run to come.
    """

    def __init__(self, wanted: str, environment: Mapping[str, str]) -> None:
        """``wanted``: to import; ``environment``: what the run most likely needs, but for its mark."""
        self.mark = os.urandom(_MARK_BYTES).hex()
        self._environment = marked(environment, self.mark)
        self._started: StartedZygote | None = StartedZygote(
            f"{start.ZYGOTE_AHEAD}{wanted}", self._environment
        )

    def take(self, environment: Mapping[str, str]) -> StartedZygote | None:
        """Return the zygote if it was started for this, once; else end it."""
        # INVARIANT same-environment: ranks have the variables that the run's settings ask for, from before
        # torch was imported. Broken if: a process is taken that was started with others.
        # Guarded by: test_a_zygote_that_was_started_for_other_settings_is_replaced.
        if dict(environment) != self._environment or not self._has_our_limits():
            self.end()
        taken, self._started = self._started, None
        return taken

    def _has_our_limits(self) -> bool:
        """Allow it as many open files as were allowed to this process since then; whether that worked."""
        if self._started is None:
            return False
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.prlimit(self._started.process.pid, resource.RLIMIT_NOFILE, limits)
        except OSError:  # it has ended, or the system does not let us
            return False
        return True

    def end(self) -> None:
        """Leave nothing of it behind. Nothing to do where it was taken."""
        started, self._started = self._started, None
        if started is not None:
            started.process.kill()
            started.process.wait()
            started.connection.close()
            os.close(started.output)
