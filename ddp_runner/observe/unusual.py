"""Which ranks of many are worth a look, and why: what differs from what most of them do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddp_runner.observe.view import RankView, RunView

DATA_WAIT_MANY = 0.2  # of a step's time
LATE_S = 1.0  # in one phase, where most are younger
LATE_FACTOR = 3.0
MEMORY_FACTOR = 1.5
MEMORY_MORE_BYTES = 500_000_000
_IN_TROUBLE = ("dead", "lost", "failed", "faulted", "recovering", "restarting", "aborting")
# What slows a GPU down that something is wrong with, in short; a power cap is how many are run.
_WRONG_REASONS = {
    "hardware slowdown": "GPU slowed down",
    "hardware thermal slowdown": "GPU is too hot",
    "software thermal slowdown": "GPU is too hot",
    "power brake": "GPU power brake",
}


@dataclass(frozen=True, slots=True)
class GpuTrouble:
    """What is wrong with a GPU: in a cell of the table, and in a line."""

    short: str
    said: str


def unusual(view: RunView) -> list[tuple[RankView, str]]:
    """The ranks with what is unusual of them, worst first; of equally bad ones by number.

    In trouble: a state of a fault, or a GPU with a problem. Then: another state than most have, a step
    behind, long in one phase, slow, waiting for data, much memory.
    """
    if not view.ranks:
        return []
    usual = _Usual(view)
    found = []
    for rank in view.ranks:
        severity, why = usual.judge(rank)
        if why:
            found.append((severity, rank.rank, rank, why))
    return [(rank, why) for _, _, rank, why in sorted(found, key=lambda one: one[:2])]


def gpu_trouble(view: RunView) -> dict[int, GpuTrouble]:
    """By rank: what is wrong with its GPU, or slows it down though nobody has asked for that."""
    found: dict[int, GpuTrouble] = {}
    for gpu in view.gpus:
        reading = gpu.reading
        all_of_it = [GpuTrouble("GPU has a problem", problem) for problem in reading.problems]
        all_of_it += [
            GpuTrouble(_WRONG_REASONS[reason], f"{reason} of the GPU")
            for reason in reading.throttling
            if reason in _WRONG_REASONS
        ]
        if reading.ecc_uncorrected:
            said = f"{reading.ecc_uncorrected} memory errors of the GPU"
            all_of_it.append(GpuTrouble("GPU memory errors", said))
        for rank in gpu.ranks if all_of_it else ():
            found[rank] = all_of_it[0]
    return found


_NO_TROUBLE = GpuTrouble("", "")


class _Usual:
    """What most ranks of a run do now."""

    def __init__(self, view: RunView) -> None:
        ranks = view.ranks
        self._state = Counter(rank.state for rank in ranks).most_common(1)[0][0]
        self._step = max(rank.step for rank in ranks)
        self._age_s = median(rank.phase_age_s for rank in ranks)
        self._rss_bytes = median(rank.rss_bytes for rank in ranks)
        self._slow: Mapping[int, float] = view.stragglers
        self._gpu = gpu_trouble(view)

    def judge(self, rank: RankView) -> tuple[int, str]:
        """How bad (0 is the worst), and why; empty: as usual."""
        late_s = max(LATE_S, LATE_FACTOR * self._age_s)
        more_bytes = rank.rss_bytes - self._rss_bytes
        is_large = rank.rss_bytes > MEMORY_FACTOR * self._rss_bytes
        rules: Sequence[tuple[bool, str]] = (
            (rank.state in _IN_TROUBLE, rank.state),
            (rank.rank in self._gpu, self._gpu.get(rank.rank, _NO_TROUBLE).short),
            (rank.state != self._state, rank.state),
            (rank.step < self._step - 1, f"{self._step - rank.step:,} steps behind"),
            (
                not rank.building and rank.phase_age_s > late_s,
                f"{rank.phase_age_s:.0f} s in {rank.phase}",
            ),
            (rank.rank in self._slow, f"{self._slow.get(rank.rank, 0):.1f} times as slow"),
            ((rank.data_wait_share or 0.0) >= DATA_WAIT_MANY, "waits for data"),
            (is_large and more_bytes > MEMORY_MORE_BYTES, "much memory"),
        )
        return next(((number, why) for number, (is_so, why) in enumerate(rules) if is_so), (99, ""))


def in_groups(ranks: Sequence[RankView], groups_max: int) -> list[list[RankView]]:
    """Neighbouring ranks together, those of one machine where there are several, in at most so many groups."""
    by_node: dict[int, list[RankView]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank)
    if 1 < len(by_node) <= groups_max:
        return [group for _, group in sorted(by_node.items())]
    each = -(-len(ranks) // max(1, groups_max))
    return [list(ranks[first : first + each]) for first in range(0, len(ranks), each)]
