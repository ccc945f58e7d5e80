"""Layout of the live display: a view and a width in, lines of coloured spans out. Draws nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ddp_runner.observe import format as fmt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_runner.observe.view import RankView, RunView

AGE_SHOWN_FROM_S = 1.0
WIDTH_MIN = 40
_WIDTH_MAX = 120  # wider lines are harder to read, not easier


class Role(Enum):
    """What a span means; the painter gives each meaning one colour."""

    PLAIN = "plain"
    QUIET = "quiet"  # labels and what is as expected
    STRONG = "strong"
    GOOD = "good"
    BUSY = "busy"  # on its way to being good
    CARE = "care"  # being repaired, or worth a look
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of one line."""

    text: str
    role: Role = Role.PLAIN


Line = list[Span]

ROLE_OF_STATE = {
    "running": Role.GOOD,
    "training": Role.GOOD,
    "done": Role.GOOD,
    "finished": Role.GOOD,
    "waiting": Role.QUIET,
    "starting": Role.BUSY,
    "ready": Role.BUSY,
    "forming": Role.BUSY,
    "stopping": Role.BUSY,
    "saving": Role.BUSY,
    "recovering": Role.CARE,
    "restarting": Role.CARE,
    "faulted": Role.BAD,
    "dead": Role.BAD,
    "lost": Role.BAD,
    "failed": Role.BAD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What a progress bar is made of."""

    full: str
    half: str
    rest: str


UNICODE = Glyphs(full="━", half="╸", rest="━")
ASCII = Glyphs(full="=", half="-", rest=".")


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
)
_DROP_ORDER = ("data", "memory", "samples/s", "device", "loss", "")


def frame(view: RunView, *, width: int, ranks_max: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """The display as lines of at most ``width`` columns, with at most ``ranks_max`` rank rows."""
    width = max(WIDTH_MIN, min(width - 1, _WIDTH_MAX))
    columns, gap = _fitting(width)
    shown, hidden = _chosen(view.ranks, ranks_max)
    lines = [
        [],
        _header(view, width),
        _bar(view, width, glyphs),
        _figures(view, width),
        [],
        _titles(columns, gap),
        *(_row(rank, columns, gap) for rank in shown),
    ]
    if hidden:
        lines.append([Span(f" {_hidden_note(hidden)}", Role.QUIET)])
    return lines


def _header(view: RunView, width: int) -> Line:
    left = [Span(f" {view.title}", Role.STRONG), Span(f"  {view.run_id}", Role.QUIET)]
    right = [
        Span(view.state, ROLE_OF_STATE.get(view.state, Role.PLAIN)),
        Span(f"  generation {view.generation}  ", Role.QUIET),
        Span(fmt.clock(view.elapsed_s)),
    ]
    return _spread(left, right, width)


def _bar(view: RunView, width: int, glyphs: Glyphs) -> Line:
    share = min(1.0, max(0.0, view.step / view.max_steps)) if view.max_steps > 0 else 0.0
    total = fmt.count(view.max_steps) if view.max_steps > 0 else "?"
    label = f"  {fmt.percent(int(share * 100) / 100):>4}  step {fmt.count(view.step)}/{total}"
    if view.doing:
        label = f"  {view.doing} {fmt.clock(view.doing_s)}"
    cells = max(5, width - len(label) - 1)
    halves = int(2 * cells * share)
    full, half = divmod(halves, 2)
    role = Role.BAD if view.state == "failed" else Role.GOOD
    done = glyphs.full * full + glyphs.half * half
    return [
        Span(" "),
        Span(done, role),
        Span(glyphs.rest * (cells - len(done)), Role.QUIET),
        Span(label),
    ]


def _figures(view: RunView, width: int) -> Line:
    # How many epochs there are is known once the data is built.
    speed = "-" if view.samples_per_s is None else fmt.rate(view.samples_per_s)
    pairs = [
        ("epoch", "-" if view.state == "starting" else epoch_text(view)),
        ("loss", "-" if view.loss is None else fmt.figure(view.loss)),
        ("samples/s", speed),
        ("eta", "-" if view.eta_s is None else fmt.duration(view.eta_s)),
    ]
    if view.epochs is None:
        pairs = [("optimizer steps", fmt.count(view.step))]
    left = [span for pair in pairs for span in _labelled(*pair)]
    if view.faults_total == 0 and view.restarts == 0:
        return _spread(left, [Span("no faults", Role.QUIET)], width)
    faults = f"{view.faults_total} fault{'' if view.faults_total == 1 else 's'}"
    restarts = f"{view.restarts} restart{'' if view.restarts == 1 else 's'}"
    return _spread(left, [Span(f"{faults}, {restarts}", Role.CARE)], width)


def _labelled(label: str, value: str) -> Line:
    return [Span(f" {label} ", Role.QUIET), Span(f"{value} ")]


def epoch_text(view: RunView) -> str:
    """``2/10``, or ``2`` where the run goes by steps."""
    if not view.epochs:
        return str(view.epoch + 1)
    return f"{min(view.epoch + 1, view.epochs)}/{view.epochs}"


def _titles(columns: Sequence[_Column], gap: int) -> Line:
    return [Span(_cells(columns, [column.title for column in columns], gap), Role.QUIET)]


def _row(rank: RankView, columns: Sequence[_Column], gap: int) -> Line:
    # The age of a start is that of all its stages; the bar has the seconds of each.
    aged = rank.phase_age_s >= AGE_SHOWN_FROM_S and not rank.building
    cells = {
        "rank": (str(rank.rank), Role.STRONG),
        "device": (rank.device, Role.QUIET),
        "state": (rank.state, ROLE_OF_STATE.get(rank.state, Role.PLAIN)),
        "step": (fmt.count(rank.step), Role.PLAIN),
        "phase": (_phase(rank), Role.PLAIN),
        "": (_age(rank.phase_age_s) if aged else "", Role.CARE),
        "loss": ("-" if rank.loss is None else fmt.figure(rank.loss), Role.PLAIN),
        "samples/s": (
            "-" if rank.samples_per_s is None else fmt.rate(rank.samples_per_s),
            Role.PLAIN,
        ),
        "data": _data_cell(rank.data_wait_share),
        "memory": (fmt.byte_size(rank.rss_bytes) if rank.rss_bytes else "-", Role.PLAIN),
    }
    return [
        Span(_pad(cells[column.title][0], column, gap), cells[column.title][1])
        for column in columns
    ]


def _phase(rank: RankView) -> str:
    if rank.state in ("waiting", "starting") and rank.phase == "idle":
        return "-"
    if rank.phase == "startup" and rank.building:
        return rank.building.rpartition(" ")[2]
    return rank.phase


def _age(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 999.5 else f"{seconds / 60:.0f}m"


def _data_cell(share: float | None) -> tuple[str, Role]:
    if share is None:
        return "-", Role.PLAIN
    return fmt.percent(share), Role.CARE if share >= 0.2 else Role.PLAIN


def _cells(columns: Sequence[_Column], texts: Sequence[str], gap: int) -> str:
    return "".join(_pad(text, column, gap) for text, column in zip(texts, columns, strict=True))


def _pad(text: str, column: _Column, gap: int) -> str:
    text = text[: column.width]
    padded = text.rjust(column.width) if column.right else text.ljust(column.width)
    return " " * (column.gap + gap) + padded


def _fitting(width: int) -> tuple[list[_Column], int]:
    """The columns that fit, least important dropped first, and the extra gap between them."""
    columns = list(_COLUMNS)
    for title in ("nothing", *_DROP_ORDER):
        columns = [column for column in columns if column.title != title]
        needed = sum(column.width + column.gap for column in columns)
        if needed <= width:
            return columns, min(2, (width - needed) // len(columns))
    return columns, 0


def _chosen(ranks: Sequence[RankView], ranks_max: int) -> tuple[list[RankView], list[RankView]]:
    """The rows to show (those in trouble first, then by rank) and those left out."""
    if len(ranks) <= ranks_max:
        return list(ranks), []
    kept = max(1, ranks_max - 1)  # one line stands for the others
    urgent = (Role.BAD, Role.CARE, Role.BUSY)
    order = {role: place for place, role in enumerate(urgent)}
    by_need = sorted(
        ranks, key=lambda r: (order.get(ROLE_OF_STATE.get(r.state, Role.PLAIN), 9), r.rank)
    )
    shown = {rank.rank for rank in by_need[:kept]}
    return [r for r in ranks if r.rank in shown], [r for r in ranks if r.rank not in shown]


def _hidden_note(hidden: Sequence[RankView]) -> str:
    states = sorted({rank.state for rank in hidden})
    return f"and {len(hidden)} more: {', '.join(states)}"


def _spread(left: Line, right: Line, width: int) -> Line:
    """``left`` and ``right`` at the two ends; what does not fit is cut from the end of ``left``."""
    room = width - sum(len(span.text) for span in right) - 1
    kept: Line = []
    for span in left:
        text = span.text[: max(0, room)]
        kept.append(Span(text, span.role))
        room -= len(text)
    return [*kept, Span(" " * (room + 1)), *right]
