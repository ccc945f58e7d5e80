"""The processes beside the ranks that the zygote forks, as the supervisor holds them. Decides nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddp_runner.core.fork_specs import ForkKind, RankSpec, Spec
from ddp_runner.core.messages import Fork, SpareReady, WriteCopy
from ddp_runner.core.spare import SpareKind
from ddp_runner.supervisor.processes.children import make_output_file, read_output
from ddp_runner.system.control_channel import Channel, ChannelClosedError


class Helper:
    """Owned by a Node, for one process: a new object for each that is asked for.

    It is there from the request until the process was reaped, or is known never to come. Then the node
    closes it and forgets it.
    """

    fork_kind: ForkKind

    def __init__(self, *, token: int, now_s: float) -> None:
        # The child's end, until it goes with the fork request; and ours, open until close().
        self.channel, self._theirs = Channel.pair()
        # A file in memory that it writes to, open until close().
        self._output = make_output_file(self.fork_kind.value)
        # What the zygote's answer is known by. No two forks of a run have the same.
        self.token = token
        # When it was asked for, and once its pid is known, since then.
        self.since_s = now_s
        # None while the zygote has not answered. It may say that it is ready before that.
        self.pid: int | None = None
        # Whether it has said so. Never taken back.
        self.is_ready = False

    @property
    def name(self) -> str:
        """In messages."""
        return self.fork_kind.value

    def request(self, spec: Spec) -> Fork:
        """What the zygote is asked for."""
        return Fork(token=self.token, kind=self.fork_kind, spec=spec)

    def descriptors(self, *inherited: int) -> list[int]:
        """The child's ends, for the fork request; the caller closes the first."""
        return [self._theirs.detach(), *inherited, self._output]

    @property
    def output(self) -> int:
        """The file in memory that it writes to."""
        return self._output

    def last_output(self) -> str:
        """What it has written."""
        return read_output(self._output)

    def close(self) -> None:
        """Close channel and output; a process that is still behind them ends of it."""
        self.channel.close()
        os.close(self._output)


class StoreHost(Helper):
    """Serves the store through which ranks find each other."""

    fork_kind = ForkKind.STORE


class Spare(Helper):
    """Waits to become a rank; no rank, until it is made one."""

    fork_kind = ForkKind.SPARE

    def __init__(self, kind: SpareKind, *, token: int, now_s: float, settings: object) -> None:
        """``settings``: of the ranks, as a record."""
        super().__init__(token=token, now_s=now_s)
        self.channel.set_blocking(blocking=False)
        # What it may have built is of these, and of no others.
        self._settings = settings
        self.kind = kind
        # What it said when it was ready, of the memory that it holds.
        self.ready = SpareReady()

    def fits(self, settings: object) -> bool:
        """Whether it may become a rank in a run with these settings."""
        return self.kind is not SpareKind.MODEL or settings is self._settings

    def becomes(self, request: Fork, descriptors: Sequence[int]) -> bool:
        """Have it become a rank.

        False where that needs an ordinary fork: it is gone, or has built something else.
        """
        spec = request.spec
        if not isinstance(spec, RankSpec) or not self.fits(spec.settings):
            return False
        try:
            self.channel.send(request, descriptors=descriptors)
        except (ChannelClosedError, BlockingIOError):
            return False
        return True


class Standby(Helper):
    """A fork of the zygote that forks nobody until it takes the zygote's place."""

    fork_kind = ForkKind.STANDBY

    def take_over(self) -> PromotedZygote | None:
        """The zygote that it is from now on; None where its fork has not been answered."""
        return None if self.pid is None else PromotedZygote(self, self.pid)


class Drill(Helper):
    """Computes what a replacement would, beside the run; never becomes a rank."""

    fork_kind = ForkKind.DRILL


class Saver(Helper):
    """Writes checkpoints of what ranks have left in memory."""

    fork_kind = ForkKind.SAVER

    def give(self, order: WriteCopy) -> bool:
        """Have it write this copy; False where it is not ready, or ends: then the next one is asked."""
        if not self.is_ready:
            return False
        try:
            self.channel.send(order)
        except (ChannelClosedError, BlockingIOError):
            return False
        return True


class PromotedZygote:
    """A zygote that stood by: with the interface of one that was started, and ready at once."""

    ready = True

    def __init__(self, standby: Standby, pid: int) -> None:
        self.pid = pid
        self.channel = standby.channel
        self.output = standby.output
        self._standby = standby

    def fork(self, request: Fork, descriptors: Sequence[int]) -> None:
        """Ask for a fork; ``Forked`` with the same token answers. Raises ChannelClosedError."""
        self.channel.send(request, descriptors=descriptors)

    def mark_reaped(self, exit_code: int) -> None:
        """Nobody else waits for it."""
        del exit_code

    def close(self) -> None:
        """Close channel and output."""
        self._standby.close()
