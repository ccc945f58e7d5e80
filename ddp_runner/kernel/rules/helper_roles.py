"""The kinds of helper process, as values: whose code, how long what may take, what follows its end. Starts none.

Those of the kernel stand here; a feature has its own in its folder. What a helper alone has to do is a policy
beside the keeper that all of them share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddp_runner.kernel.wire.fork_specs import (
    DrillSpec,
    ForkKind,
    ImportsSpec,
    NothingMore,
    ProgramSpec,
    RankSpec,
    SaverSpec,
    SpareSpec,
    Spec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A kind of helper process; ``inf``: without a limit.

    ``module``: its ``main()`` is the process. ``fork``: the zygote forks it as this kind; None: it is a program with
    an interpreter of its own.
    """

    name: str
    module: str
    fork: ForkKind | None = None
    is_dispensable: bool = True  # the run goes on without it where no process can be forked
    runs_user_code: bool = False  # what it has started ends with it
    ready_s: float = math.inf  # until it says that it is, once its process is known
    silent_s: float = math.inf  # since it was heard, or asked for
    pauses_s: tuple[float, ...] = (0.0,)  # after each that failed in a row; the last one for more
    lived_s: float = math.inf  # one that lived so long has not failed at its start
    tries: float = math.inf  # that may fail in a row: then none follows
    refused_s: float = 0.0  # after no process could be forked
    end_s: float = 0.0  # for it to end by itself once the run has


STORE = Role(
    name="store",
    module="ddp_runner.kernel.rank.store_host",
    fork=ForkKind.STORE,
    is_dispensable=False,
    ready_s=10.0,
)
STANDBY = Role(
    name="standby",
    module="ddp_runner.kernel.rank.zygote",
    fork=ForkKind.STANDBY,
    pauses_s=(1.0,),
    refused_s=60.0,
)


SAVER = Role(
    name="saver",
    module="ddp_runner.rank.saver",
    fork=ForkKind.SAVER,
    # One that has lived is replaced at once: somebody may wait for its file.
    pauses_s=(0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0),
    lived_s=5.0,
    refused_s=1.0,
)
DOUBLED_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # pauses of a program beside the run


FORKED = (STORE, STANDBY, SAVER)
# What a fork of each kind needs to know.
SPEC_OF: dict[ForkKind, type[Spec]] = {
    ForkKind.RANK: RankSpec,
    ForkKind.LOOP: RankSpec,
    ForkKind.PROGRAM: ProgramSpec,
    ForkKind.IMPORTS: ImportsSpec,
    ForkKind.STORE: NothingMore,
    ForkKind.STANDBY: NothingMore,
    ForkKind.SPARE: SpareSpec,
    ForkKind.DRILL: DrillSpec,
    ForkKind.SAVER: SaverSpec,
}


@dataclass(slots=True)
class Tries:
    """Counts the processes of a role that have failed in a row, and knows when another one may follow."""

    failures: int = 0
    not_before_s: float = -math.inf

    def allow(self, role: Role, now_s: float) -> bool:
        """Return True if another one may be started now."""
        return self.failures < role.tries and now_s >= self.not_before_s

    def ended(self, role: Role, now_s: float, *, lived_s: float) -> None:
        """One has ended that was not asked to; the row begins with it where it had lived."""
        self.failures = 1 if lived_s >= role.lived_s else self.failures + 1
        self.not_before_s = now_s + role.pauses_s[min(self.failures, len(role.pauses_s)) - 1]

    def refused(self, role: Role, now_s: float) -> None:
        """No process could be forked for one."""
        self.not_before_s = now_s + role.refused_s

    def was_of_use(self) -> None:
        """One has done what it is for: those before it are forgotten."""
        self.failures, self.not_before_s = 0, -math.inf
