"""The processes beside the ranks that the zygote forks, as the supervisor holds them, and whose process has ended.

Decides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.core.fork_specs import Spec
from ddp_runner.core.helper_roles import Role
from ddp_runner.core.messages import Fork, Message, WriteCopy
from ddp_runner.supervisor.processes.children import Ended, make_output_file
from ddp_runner.supervisor.processes.rank_process import WhatItWrote
from ddp_runner.system.control_channel import Channel, ChannelClosedError


class Helper:
    """Owned by a Node, for one process of a role: a new object for each that is asked for.

    It is there from the request until the process was reaped, or is known never to come. Then the node
    closes it and forgets it.
    """

    def __init__(self, role: Role, spec: Spec, *, token: int, now_s: float) -> None:
        self.role = role
        # What it was sent when it was asked for.
        self.spec = spec
        # The child's end, until it goes with the fork request; and ours, open until close().
        self.channel, self._theirs = Channel.pair()
        # A file in memory that it writes to, open until close().
        self.output = make_output_file(role.name)
        # What the zygote's answer is known by. No two forks of a run have the same.
        self.token = token
        # When it was asked for, and once its pid is known, since then.
        self.since_s = now_s
        # None while the zygote has not answered. It may say that it is ready before that.
        self.pid: int | None = None
        # What it said when it was ready; None before that.
        self.ready: Message | None = None
        # Whether we end it ourselves to have another one: then its end is a consequence, and no cause.
        self.is_unwanted = False

    @property
    def is_ready(self) -> bool:
        """True once the process has reported that it is ready. Never taken back."""
        return self.ready is not None

    @property
    def request(self) -> Fork:
        """The request to the zygote."""
        assert self.role.fork is not None
        return Fork(
            token=self.token,
            kind=self.role.fork,
            module=self.role.module,
            is_dispensable=self.role.is_dispensable,
            spec=self.spec,
        )

    def descriptors(self, *inherited: int) -> list[int]:
        """The child's ends, for the fork request; the caller closes the first."""
        return [self._theirs.detach(), *inherited, self.output]

    def close(self) -> None:
        """Close channel and output; a process that is still behind them ends of it."""
        self.channel.close()
        os.close(self.output)

    def give(self, order: WriteCopy) -> bool:
        """Have it write this copy; False where it is not ready, or ends: then the next one is asked."""
        if self.ready is None:
            return False
        try:
            self.channel.send(order)
        except (ChannelClosedError, BlockingIOError):
            return False
        return True


class PromotedZygote:
    """A zygote that stood by: with the interface of one that was started, and ready at once."""

    ready = True

    def __init__(self, standby: Helper, pid: int) -> None:
        self.pid = pid
        self.channel = standby.channel
        self.output = standby.output
        self._standby = standby

    def fork(self, request: Fork, descriptors: Sequence[int]) -> None:
        """Ask for a fork; ``Forked`` with the same token answers. Raises ChannelClosedError."""
        self.channel.send(request, descriptors=descriptors)

    def mark_reaped(self, exit_code: int) -> None:
        """Do nothing: no other code waits for the process."""
        del exit_code

    def close(self) -> None:
        """Close channel and output."""
        self._standby.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteEnded:
    """The zygote is gone; ``output`` is what it said last."""

    ended: Ended
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperEnded:
    """The process of a role is gone; ``output`` is what it said last. ``was_unwanted``: we have ended it."""

    role: Role
    ended: Ended
    output: str
    was_unwanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """The process of rank ``rank`` is gone; ``wrote`` is what it had to say."""

    ended: Ended
    rank: int
    wrote: WhatItWrote


Departure = RankEnded | HelperEnded | ZygoteEnded
