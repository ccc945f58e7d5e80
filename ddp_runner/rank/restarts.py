"""The restarts of one job as one run: their times on one line, and what ended each of them. Pure.

Under an outside launcher nobody watches the ranks. What is known of an earlier restart is what its
ranks told before they ended; a rank that told nothing of a fault is the one that was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ddp_runner.core.classify import attribute
from ddp_runner.core.faults import Fault, FaultKind
from ddp_runner.core.messages import Faulted, Finished, Message, RepairedInPlace, RestartProgress
from ddp_runner.observe.summary import FaultRecord, TimeShares

SPENT = ("productive", "data_wait", "checkpoint", "comparison", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One of them, by what its rank 0 told; ``shift_ns`` brings its times to the newest one's clock."""

    lives: tuple[RestartProgress, ...]
    shift_ns: int

    @property
    def generation(self) -> int:
        """Its number, from 1 on."""
        return self.lives[0].generation

    @property
    def began_ns(self) -> int:
        """When its process began."""
        return self.lives[0].began_ns + self.shift_ns

    @property
    def formed_ns(self) -> int:
        """When its ranks began to train; 0: they never did."""
        formed_ns = self.lives[-1].formed_ns
        return formed_ns + self.shift_ns if formed_ns else 0

    @property
    def first_step(self) -> int | None:
        """The step that it went on from; None where it never trained."""
        return next((life.step for life in self.lives if life.formed_ns), None)

    def spent_ns(self, name: str, *, up_to_step: int | None = None) -> int:
        """Of one share, until ``up_to_step`` was committed."""
        counted = [one for one in self.lives if up_to_step is None or one.step <= up_to_step]
        return counted[-1].spent_ns.get(name, 0) if counted else 0


def restarts_of(told: Iterable[Message]) -> list[Restart]:
    """The restarts that rank 0 told of, oldest first, on one clock: that of the newest."""
    lives: dict[int, list[RestartProgress]] = {}
    for message in told:
        if isinstance(message, RestartProgress):
            lives.setdefault(message.generation, []).append(message)
    found: list[Restart] = []
    for _, own in sorted(lives.items(), reverse=True):
        shift_ns = 0
        if found:
            after = found[-1]
            same = own[-1].clock == after.lives[0].clock
            # Another machine, or boot: nobody knows how long nothing ran, so it counts as no time.
            shift_ns = after.shift_ns if same else after.began_ns - own[-1].at_ns
        found.append(Restart(lives=tuple(own), shift_ns=shift_ns))
    return found[::-1]


def faults_between(
    restarts: Sequence[Restart], told_by_rank: Mapping[int, Sequence[Message]]
) -> list[FaultRecord]:
    """What ended each restart but the newest, as far as its ranks could tell."""
    records = []
    for restart, after in pairwise(restarts):
        culprit, victims = _culprit(restart, told_by_rank)
        if culprit is None:
            continue
        first_step = after.first_step
        detected_s = seconds_since(restarts, culprit.at_ns + restart.shift_ns)
        recovered_s = seconds_since(restarts, after.formed_ns) if after.formed_ns else None
        lost = 0 if first_step is None else culprit.step - first_step
        records.append(
            FaultRecord(
                kind=culprit.kind.value,
                rank=culprit.rank,
                step=culprit.step,
                cause=culprit.cause,
                detected_s=round(detected_s, 3),
                recovered_s=None if recovered_s is None else round(recovered_s, 3),
                steps_lost=max(0, lost),
                generation=restart.generation,
                detail=culprit.detail,
                victims=victims,
                seconds={}
                if recovered_s is None
                else {"total": round(recovered_s - detected_s, 4)},
            )
        )
    return records


def _culprit(
    restart: Restart, told_by_rank: Mapping[int, Sequence[Message]]
) -> tuple[Fault | None, tuple[int, ...]]:
    """Who ended this restart, and who merely lost a peer; None where it ended in order."""
    number = restart.generation
    faults: list[Fault] = []
    silent: list[int] = []
    for rank, told in told_by_rank.items():
        own = _of_restart(told, number)
        faults += [one.fault for one in own if isinstance(one, Faulted)]
        if own and not any(isinstance(one, (Faulted, Finished)) for one in own):
            silent.append(rank)
    if not faults and not silent:
        return None, ()
    at_ns = min((fault.at_ns for fault in faults), default=restart.lives[-1].at_ns)
    step = max((fault.step for fault in faults), default=max(0, restart.lives[-1].step))
    if silent:
        who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {','.join(map(str, silent))}"
        lost = Fault(
            kind=FaultKind.RANK_EXITED,
            rank=silent[0] if len(silent) == 1 else -1,
            step=step,
            cause=f"{who} ended without a word: killed, or exited",
            at_ns=at_ns,
        )
        faults.append(lost)
    found = attribute(faults)
    return found.culprit, tuple(sorted({victim.rank for victim in found.victims}))


def _of_restart(told: Sequence[Message], number: int) -> list[Message]:
    """What a rank told in this restart: from its first sign of life there to that in the next one."""
    own: list[Message] = []
    current = 0
    for message in told:
        if isinstance(message, RestartProgress):
            current = message.generation
        if current == number:
            own.append(message)
    return own


def mended_record(message: RepairedInPlace, restarts: Sequence[Restart]) -> FaultRecord:
    """A fault that a rank mended within its restart."""
    fault = message.fault
    own = [restart for restart in restarts if restart.lives[0].began_ns <= fault.at_ns]
    home = own[-1] if own else None
    at_ns = fault.at_ns + (home.shift_ns if home else 0)
    detected_s = max(0.0, seconds_since(restarts, at_ns))
    return FaultRecord(
        kind=fault.kind.value,
        rank=fault.rank,
        step=fault.step,
        cause=fault.cause,
        detected_s=round(detected_s, 3),
        recovered_s=round(detected_s + message.seconds, 3),
        steps_lost=message.steps_lost,
        generation=home.generation if home else 0,
        detail=fault.detail,
        seconds={"total": round(message.seconds, 4)},
    )


def seconds_since(restarts: Sequence[Restart], at_ns: int) -> float:
    """From the beginning of the first restart to ``at_ns``, a time of the newest one's clock."""
    return (at_ns - restarts[0].began_ns) / 1e9


def time_shares(restarts: Sequence[Restart], faults: Sequence[FaultRecord]) -> TimeShares:
    """Where the time of all restarts went; what was computed behind the checkpoint was lost."""
    totals = dict.fromkeys(SPENT, 0)
    lost_ns = 0
    for restart in restarts:
        for name in SPENT:
            totals[name] += restart.spent_ns(name)
    for restart, after in pairwise(restarts):
        kept_ns = restart.spent_ns("productive", up_to_step=after.first_step)
        lost_ns += restart.spent_ns("productive") - kept_ns
    began_at_ns = [
        one.lives[-1].first_step_ns + one.shift_ns
        for one in restarts
        if one.lives[-1].first_step_ns
    ]
    startup_s = seconds_since(
        restarts, began_at_ns[0] if began_at_ns else restarts[-1].lives[-1].at_ns
    )
    recovery_s = sum(one.recovered_s - one.detected_s for one in faults if one.recovered_s)
    return TimeShares(
        startup=round(max(0.0, startup_s), 3),
        productive=round((totals["productive"] - lost_ns) / 1e9, 3),
        data_wait=round(totals["data_wait"] / 1e9, 3),
        checkpoint=round(totals["checkpoint"] / 1e9, 3),
        comparison=round(totals["comparison"] / 1e9, 3),
        evaluation=round(totals["evaluation"] / 1e9, 3),
        recovery=round(recovery_s, 3),
        lost=round(lost_ns / 1e9, 3),
    )
