"""The table of ranks in the live display: a row each, or where they are too many a row for neighbours.

Its columns have fixed widths, so that none moves when a figure changes, and the least important ones are
left out where there is no room. What ``rich.table`` would do for the rest takes six times as long, four
times a second, in a process that has faults to watch for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from rich.text import Text

from ddp_runner.observe import format as fmt
from ddp_runner.observe.format import printable
from ddp_runner.observe.view import GpuView, RankView, RunView

AGE_SHOWN_FROM_S = 1.0
_GROUPS_MAX = 8
_HOT_C = 85.0
# Styles by what they mean, as rich knows them.
PLAIN, STRONG = "", "bold"
QUIET = "dim"  # labels and what is as expected
GOOD, BAD = "green", "bold red"
BUSY = "cyan"  # on its way to being good
CARE = "yellow"  # being repaired, or worth a look
STYLE_OF_STATE = {
    **dict.fromkeys(("running", "training", "done", "finished"), GOOD),
    **dict.fromkeys(("starting", "ready", "forming", "stopping", "saving"), BUSY),
    **dict.fromkeys(("recovering", "restarting", "stopped"), CARE),
    **dict.fromkeys(("faulted", "dead", "lost", "failed"), BAD),
    "waiting": QUIET,
}
Cell = tuple[str, str]  # a text and its style
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    title: str
    width: int
    right: bool = True
    gap: int = 1


_COLUMNS = (
    _Column(title="rank", width=4, gap=1),
    _Column(title="device", width=6, right=False),
    _Column(title="state", width=10, right=False),
    _Column(title="step", width=7),
    _Column(title="phase", width=10, right=False, gap=2),
    _Column(title="", width=4),
    _Column(title="loss", width=7),
    _Column(title="samples/s", width=9),
    _Column(title="data", width=4),
    _Column(title="memory", width=7),
    _Column(title="cpu", width=4),
    _Column(title="gpu", width=4),
    _Column(title="gpu mem", width=7),
    _Column(title="temp", width=4),
)
_WHY = _Column(title="differs by", width=17, right=False, gap=2)
_SAME_EVERYWHERE = ("loss", "samples/s")  # the figures above the table have them
_DROP_ORDER = ("temp", "cpu", "gpu mem", "gpu", "data", "memory", "samples/s", "device", "loss", "")
_DROP_ORDER_ON_GPUS = (
    *("samples/s", "cpu", "temp", "loss", "memory", "", "gpu mem", "data", "device", "gpu"),
)


def line(*parts: str | Cell) -> Text:
    """Return one line of the frame; control characters are written out, so that it stays one line."""
    found = Text()
    for part in parts:
        text, style = (part, PLAIN) if isinstance(part, str) else part
        found.append(printable(text).replace("\n", " ").replace("\t", " "), style)
    return found


def rank_table(view: RunView, *, width: int, lines_max: int) -> list[Text]:
    """Return title and rows of the table, at most ``lines_max`` (3 at least) lines of ``width`` columns."""
    room = max(2, lines_max - 1)
    gpus = {rank: gpu for gpu in view.gpus for rank in gpu.ranks}
    if len(view.ranks) <= room:
        labels = [str(rank.rank) for rank in view.ranks]
        columns, gap = _fitting(width, labels, view, gpus)
        rows = [_row(rank, gpus) for rank in view.ranks]
        return [_titles(columns, gap), *(_line(row, columns, gap) for row in rows)]
    return _summed_up(view, gpus, width=width, room=room)


def _summed_up(view: RunView, gpus: Mapping[int, GpuView], *, width: int, room: int) -> list[Text]:
    """A row for each group of ranks, and below it those that differ from the others."""
    odd = unusual(view)
    groups = in_groups(view.ranks, max(1, min(_GROUPS_MAX, room // 2)))
    labels = [f"{group[0].rank}-{group[-1].rank}" for group in groups]
    columns = _fitting_groups(width, labels, view, gpus)
    lines = [_titles(columns, 0)]
    for label, group in zip(labels, groups, strict=True):
        lines.append(_line(_group_row(label, group, gpus), columns, 0))
    left = room - len(groups) - 1
    if not odd:
        return [*lines, line((f" all {len(view.ranks)} ranks are alike", QUIET))]
    shown = odd[:left] if len(odd) <= left else odd[: max(0, left)]
    more = len(odd) - len(shown)
    title = f" {len(odd)} of {len(view.ranks)} ranks differ from the others"
    if more:
        title += f"; {more} more than are shown" if shown else f": {_kinds(odd)}"
    lines.append(line((title, CARE)))
    for rank, why in sorted(shown, key=lambda one: one[0].rank):
        lines.append(_line(_row(rank, gpus, why=why), columns, 0))
    return lines


def _kinds(odd: Sequence[tuple[RankView, str]]) -> str:
    return ", ".join(dict.fromkeys(why for _, why in odd))


def _row(rank: RankView, gpus: Mapping[int, GpuView], why: str = "") -> dict[str, Cell]:
    found = _group_row(str(rank.rank), [rank], gpus)
    return {**found, "device": (rank.device, QUIET), _WHY.title: (why, CARE)}


def _group_row(
    label: str, group: Sequence[RankView], gpus: Mapping[int, GpuView]
) -> dict[str, Cell]:
    """Return a row for neighbours: the most common state, and of each figure the most notable value."""
    state, states = _most([rank.state for rank in group])
    phase, _ = _most([_phase(rank) for rank in group])
    role = STYLE_OF_STATE.get(state, PLAIN)
    known = [rank.loss for rank in group if rank.loss is not None]
    rates = [rank.samples_per_s for rank in group if rank.samples_per_s is not None]
    waits = [rank.data_wait_share for rank in group if rank.data_wait_share is not None]
    shares = [rank.cpu_share for rank in group if rank.cpu_share is not None]
    # The age of a start is that of all its stages; the bar has the seconds of each.
    youngest_s = min(rank.phase_age_s for rank in group)
    is_aged = youngest_s >= AGE_SHOWN_FROM_S and not any(rank.building for rank in group)
    devices = {rank.device.partition(":")[0] for rank in group}
    most_bytes = max(rank.rss_bytes for rank in group)
    return {
        "rank": (label, STRONG),
        "device": (devices.pop() if len(devices) == 1 else "mixed", QUIET),
        "state": (state if states == len(group) else f"{states} {state}", role),
        "step": (fmt.count(min(rank.step for rank in group)), PLAIN),
        "phase": (phase, PLAIN),
        "": (_age(youngest_s) if is_aged else "", CARE),
        "loss": (fmt.figure(known[0]) if known else "-", PLAIN),
        "samples/s": (fmt.rate(fmean(rates)) if rates else "-", PLAIN),
        "data": _data_cell(max(waits, default=None)),
        "memory": (fmt.byte_size(most_bytes) if most_bytes else "-", PLAIN),
        "cpu": _cpu_cell(fmean(shares) if shares else None),
        **_gpu_cells(
            list({id(gpu): gpu for rank in group if (gpu := gpus.get(rank.rank))}.values())
        ),
        _WHY.title: ("", PLAIN),
    }


def _gpu_cells(gpus: Sequence[GpuView]) -> dict[str, Cell]:
    """Return cells for several GPUs: the mean use, and the highest memory and temperature."""
    readings = [gpu.reading for gpu in gpus]
    uses = [one.use for one in readings if one.use is not None]
    taken = [one.memory_used_bytes for one in readings if one.memory_used_bytes is not None]
    warm = [one.temperature_c for one in readings if one.temperature_c is not None]
    hot = CARE if warm and max(warm) >= _HOT_C else PLAIN
    return {
        "gpu": (fmt.percent(fmean(uses)) if uses else "-", PLAIN),
        "gpu mem": (fmt.byte_size(max(taken)) if taken else "-", PLAIN),
        "temp": (f"{max(warm):.0f}" if warm else "-", hot),
    }


def _most(values: Sequence[str]) -> tuple[str, int]:
    """The commonest, the first of them where several are, and how often."""
    return Counter(values).most_common(1)[0]


def _phase(rank: RankView) -> str:
    if rank.state in ("waiting", "starting") and rank.phase == "idle":
        return "-"
    if rank.phase == "startup" and rank.building:
        return rank.building.rpartition(" ")[2]
    return rank.phase


def _age(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 999.5 else f"{seconds / 60:.0f}m"


def _data_cell(share: float | None) -> Cell:
    if share is None:
        return "-", PLAIN
    return fmt.percent(share), CARE if share >= DATA_WAIT_MANY else PLAIN


def _cpu_cell(share: float | None) -> Cell:
    """Cores, as people know them from top: 150% is one and a half."""
    return ("-" if share is None else fmt.percent(share)), PLAIN


def _titles(columns: Sequence[_Column], gap: int) -> Text:
    return line(("".join(_pad(column.title, column, gap) for column in columns), QUIET))


def _line(row: Mapping[str, Cell], columns: Sequence[_Column], gap: int) -> Text:
    return line(*((_pad(row[one.title][0], one, gap), row[one.title][1]) for one in columns))


def _pad(text: str, column: _Column, gap: int) -> str:
    text = text[: column.width]
    padded = text.rjust(column.width) if column.right else text.ljust(column.width)
    return " " * (column.gap + gap) + padded


def _fitting(
    width: int, labels: Sequence[str], view: RunView, gpus: Mapping[int, GpuView]
) -> tuple[list[_Column], int]:
    """The columns that fit and have anything to show, least important dropped first, and a gap between them."""
    columns = _known(labels, view, gpus)
    for title in ("nothing", *(_DROP_ORDER_ON_GPUS if gpus else _DROP_ORDER)):
        columns = [column for column in columns if column.title != title]
        needed = _needed(columns)
        if needed <= width:
            return columns, min(2, (width - needed) // len(columns))
    return columns, 0


def _fitting_groups(
    width: int, labels: Sequence[str], view: RunView, gpus: Mapping[int, GpuView]
) -> list[_Column]:
    """The same for groups, of which a last column says what is unusual: it has all the room that is left."""
    known = _known(labels, view, gpus)
    columns = [one for one in known if one.title not in _SAME_EVERYWHERE]
    for title in ("nothing", *(_DROP_ORDER_ON_GPUS if gpus else _DROP_ORDER)):
        columns = [column for column in columns if column.title != title]
        needed = _needed([*columns, _WHY])
        if needed <= width:
            return [*columns, replace(_WHY, width=_WHY.width + width - needed)]
    return columns


def _needed(columns: Sequence[_Column]) -> int:
    return sum(column.width + column.gap for column in columns)


def _known(labels: Sequence[str], view: RunView, gpus: Mapping[int, GpuView]) -> list[_Column]:
    longest = max((len(label) for label in labels), default=0)
    return [
        replace(column, width=max(column.width, longest)) if column.title == "rank" else column
        for column in _COLUMNS
        if _is_known(column.title, view, gpus)
    ]


def _is_known(title: str, view: RunView, gpus: Mapping[int, GpuView]) -> bool:
    """Return True if any rank has this figure, of those that not every run has."""
    readings = [gpu.reading for gpu in gpus.values()]
    match title:
        case "loss" | "samples/s" | "data":
            return view.epochs is not None  # nobody knows them of a script
        case "cpu":
            return any(rank.cpu_share is not None for rank in view.ranks)
        case "gpu":
            return any(one.use is not None for one in readings)
        case "gpu mem":
            return any(one.memory_used_bytes is not None for one in readings)
        case "temp":
            return any(one.temperature_c is not None for one in readings)
        case _:
            return True


@dataclass(frozen=True, slots=True)
class GpuTrouble:
    """A problem of a GPU: for a cell of the table, and for a line."""

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
    """Return by rank a problem of its GPU, or a reason for which it is slowed down unasked."""
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
    """The usual state of a run's ranks now."""

    def __init__(self, view: RunView) -> None:
        ranks = view.ranks
        self._state = Counter(rank.state for rank in ranks).most_common(1)[0][0]
        self._step = max(rank.step for rank in ranks)
        self._age_s = median(rank.phase_age_s for rank in ranks)
        self._rss_bytes = median(rank.rss_bytes for rank in ranks)
        self._slow: Mapping[int, float] = view.stragglers
        self._gpu = gpu_trouble(view)

    def judge(self, rank: RankView) -> tuple[int, str]:
        """Return the severity (0 is the worst), and the reason; an empty one if the rank is as usual."""
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
