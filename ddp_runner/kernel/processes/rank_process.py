"""The process of a rank as its node holds it: pid, channel, output and log. Decides nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.kernel.processes.children import (
    WORDS_BYTES,
    Ended,
    file_size,
    make_output_file,
    read_end,
    read_output,
)
from ddp_runner.kernel.rules.classify import RankExit, signal_name
from ddp_runner.kernel.rules.crash_output import (
    SELF_MADE_SIGNALS,
    read_crash_output,
    read_stack,
    user_frame,
)
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin
from ddp_runner.kernel.rules.secrets import without_secrets
from ddp_runner.kernel.system.control_channel import Channel
from ddp_runner.kernel.wire.board import SlotReading

STACKS_QUIET_S = 0.15  # without another byte: it has written them


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatItWrote:
    """The output of a process that has ended."""

    last: str  # the end of its log or, where it has not come so far, of what came before
    when_asked: str  # since it was asked where it hangs; empty where it was not
    before_log: str  # before it had a log file

    def without(self, secrets: Sequence[str]) -> WhatItWrote:
        """The same, for others than its log. Before anything is cut, which might leave half a secret."""
        return WhatItWrote(
            last=without_secrets(self.last, secrets),
            when_asked=without_secrets(self.when_asked, secrets),
            before_log=without_secrets(self.before_log, secrets),
        )


class RankProcess:
    """Owned by a :class:`Node`, for the whole run; the processes of the rank come and go."""

    def __init__(self, rank: int, *, log_dir: Path) -> None:
        # Its number at launch.
        self.rank = rank
        # Of all processes of the rank, or of those of one attempt; somebody may have removed it.
        self.log_path = log_dir / f"rank_{rank}.log"

        # Of its process: each begins again with the next one, in open_lines().

        # None while the zygote has not answered, and once it was reaped: a pid that is not None may be
        # signalled.
        self.pid: int | None = None
        # What the zygote's answer is known by. No two forks of a run have the same.
        self.token = -1
        # When it was asked for; None before that, and once nothing more comes of it.
        self.asked_at_s: float | None = None
        # Our end of its control channel; there from open_lines() to close_lines(), unless the process
        # was to be killed before its pid was known.
        self.channel: Channel | None = None
        # A file in memory that it writes to before it has a log; -1 where there is no process.
        self._output = -1
        # Where the lines of this process begin in its log, behind those of the processes before.
        self._log_begin = 0
        # How much it had written when it was first asked where it hangs; None: not in this incident.
        self._asked_bytes: int | None = None
        # How much it had written by the newest look since then, and when that was last more.
        self._seen_bytes, self._seen_s = -1, 0.0

    @property
    def is_owed(self) -> bool:
        """True if the zygote was asked for the process and has not answered."""
        return self.asked_at_s is not None and self.pid is None

    @property
    def output(self) -> int | None:
        """The descriptor that the process writes to before it has a log file; None if there is no process."""
        return self._output if self._output >= 0 else None

    def open_lines(self, *, token: int, now_s: float) -> tuple[int, int]:
        """New channel and output for a new process; the child's ends, for the fork request."""
        self.close_lines()
        self.channel, theirs = Channel.pair()
        self._output = make_output_file(f"rank_{self.rank}")
        self._log_begin = file_size(self.log_path)
        self.token, self.asked_at_s = token, now_s
        return theirs.detach(), self._output

    def close_lines(self) -> None:
        """Close channel and output; a stale process behind them ends of it."""
        self.pid, self.asked_at_s, self._asked_bytes = None, None, None
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def log_is_gone(self) -> bool:
        """Return True if its log file was removed or moved away."""
        if os.path.lexists(self.log_path):
            return False
        self._log_begin = 0
        return True

    def mark_asked(self) -> None:
        """Note that it was asked for its stacks; asked twice for one fault, it counts once."""
        if self._asked_bytes is None:
            self._asked_bytes = self.written_bytes
            self._seen_bytes, self._seen_s = -1, 0.0

    def forget_asked(self) -> None:
        """Forget that it was asked for its stacks, so that it may be asked again."""
        self._asked_bytes = None

    def has_answered(self, now_s: float) -> bool:
        """Return True if it has written its stacks completely; asked at each tick.

        A pause of the machine is no end: the main thread's stack, which is written last, is what counts.
        """
        if self._asked_bytes is None:
            return False
        written_bytes = self.written_bytes
        if written_bytes != self._seen_bytes:
            self._seen_bytes, self._seen_s = written_bytes, now_s
        is_quiet = written_bytes > self._asked_bytes and now_s >= self._seen_s + STACKS_QUIET_S
        return is_quiet and bool(read_stack(self._written_since(self._asked_bytes)))

    def stack_when_asked(self) -> str:
        """Return the main thread's stack when it was asked; empty if it has not answered."""
        asked = self._asked_bytes
        return "" if asked is None else read_stack(self._written_since(asked))

    def what_it_wrote(self) -> WhatItWrote:
        """Read before the lines are closed."""
        asked = self._asked_bytes
        before_log = read_output(self._output) if self._output >= 0 else ""
        logged = read_end(self.log_path, begin=self._log_begin)
        return WhatItWrote(
            last=logged or (read_output(self._output, WORDS_BYTES) if self._output >= 0 else ""),
            when_asked="" if asked is None else self._written_since(asked),
            before_log=before_log,
        )

    @property
    def written_bytes(self) -> int:
        """The bytes that the rank has written, before it had a log file and since."""
        before = os.fstat(self._output).st_size if self._output >= 0 else 0
        return file_size(self.log_path) + before

    def _written_since(self, written_bytes: int) -> str:
        """Return the output of the rank since there were ``written_bytes``, from either place."""
        more_bytes = min(self.written_bytes - written_bytes, WORDS_BYTES)
        before = read_output(self._output, more_bytes) if self._output >= 0 else ""
        return before + read_end(self.log_path, begin=file_size(self.log_path) - more_bytes)


_PACKAGE = str(Path(__file__).resolve().parents[2])


def place_in(text: str) -> str:
    """Return the place in the user's code, by a traceback or stack."""
    return user_frame(text, own=_PACKAGE)


def exit_of(
    ended: Ended,
    wrote: WhatItWrote,
    *,
    rank: int,
    reading: SlotReading,
    killed_for_memory: bool,
    was_asked: bool,
    keeps_all: bool,
) -> RankExit:
    """Return everything that is known of the end of a rank's process; ``reading`` is that of its slot.

    ``was_asked``: it was made to say where it hangs; ``keeps_all``: what it said is in no file.
    """
    crash, words = None, ""
    if ended.signal_number is not None and (was_asked or is_self_made(ended.signal_number)):
        crash = read_crash_output(wrote.last, signal_name=signal_name(ended.signal_number))
        words = read_stack(wrote.when_asked) if crash is None and was_asked else ""
    return RankExit(
        rank=rank,
        step=reading.step,
        phase=reading.phase.label,
        at_ns=ended.at_ns,
        exit_code=ended.exit_code,
        signal_number=ended.signal_number,
        killed_for_memory=killed_for_memory,
        last_output=wrote.before_log if keeps_all else words,
        crash=crash,
        place="" if crash is None else place_in(crash.text),
    )


def store_died(ended: Ended, *, output: str, step: int) -> Fault:
    """The end of the store host, as a fault of nobody; ``output`` is what it said last."""
    how = (
        f"exit code {ended.exit_code}"
        if ended.signal_number is None
        else signal_name(ended.signal_number)
    )
    return Fault(
        kind=FaultKind.STORE_DIED,
        rank=-1,
        step=step,
        cause=f"the store process died ({how})",
        at_ns=ended.at_ns,
        detail=output,
        origin=Origin.OUTSIDE,  # no code of the user's runs there
    )


def is_self_made(signal_number: int) -> bool:
    """Return True if a process causes this signal itself, for example by reading invalid memory."""
    return signal_name(signal_number) in SELF_MADE_SIGNALS
