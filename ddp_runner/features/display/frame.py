"""Layout of the live display: a view in, lines for a console out. Runs in the supervisor. Writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from ddp_runner.features.display.rank_table import (
    BAD,
    CARE,
    DATA_WAIT_MANY,
    GOOD,
    PLAIN,
    QUIET,
    STRONG,
    STYLE_OF_STATE,
    Cell,
    gpu_trouble,
    line,
    rank_table,
)
from ddp_runner.observe import format as fmt
from ddp_runner.observe.format import sparkline
from ddp_runner.observe.loss_history import by_steps
from ddp_runner.observe.progress_report import epoch_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddp_runner.observe.view import FaultView, NodeView, RunView

_WIDTH_MIN = 40
_WIDTH_MAX = 120  # wider lines are harder to read, not easier
_TABLE_LINES_MIN = 4
_ROWS_KEPT = 7  # of ranks, before there are lines about older faults
_NODES_NAMED_MAX = 3
_FAULTS_MAX = 3
_CURVE_COLUMNS_MAX = 60
_CURVE_POINTS_MIN = 4  # fewer are no curve
_BAR_COLUMNS_MIN = 5
_MORE_COLUMNS = len(" and 99 more ")
_STALE_S = 20.0  # a driver's last word is that old: it is said
_LINES_ALWAYS = 6  # blank, header, bar, figures, blank, titles


def frame(view: RunView, console: Console, *, lines_max: int) -> list[list[Segment]]:
    """The display on ``console``: at most ``lines_max`` lines (10 at least), each as wide as there is room for."""
    width = max(_WIDTH_MIN, min(console.width - 1, _WIDTH_MAX))
    lines_max = max(_LINES_ALWAYS + _TABLE_LINES_MIN, lines_max)
    unicode = not console.options.ascii_only
    overflow: OverflowMethod = "ellipsis" if unicode else "crop"
    lines: list[RenderableType] = [
        Text(),
        _header(view, width, overflow),
        *([] if view.epochs is None else [_bar(view, width)]),  # of a script no end is known
        _figures(view, width),
    ]
    # What there is to say beside goes before rows of ranks, but for some that are always there.
    rows = min(len(view.ranks), _ROWS_KEPT)
    for said in _beside(view, width, unicode=unicode):
        if len(lines) + 2 + rows < lines_max:
            lines.append(said)
    lines.append(Text())
    lines += rank_table(view, width=width, lines_max=lines_max - len(lines))
    if view.state == "running" and len(lines) < lines_max:
        saves = "" if view.epochs is None else "saves and "
        lines.append(line((f" Ctrl-C {saves}stops", QUIET)))
    options = console.options.update(width=width, no_wrap=True, overflow=overflow)
    return console.render_lines(Group(*lines), options, pad=False)


def _header(view: RunView, width: int, overflow: OverflowMethod) -> Text:
    name = view.name or view.title
    left = line((f" {name}", STRONG))
    if name not in (view.title, view.title.removesuffix(".py")):
        left.append(f"  {view.title}")
    right = line(
        (view.shown_state, STYLE_OF_STATE.get(view.shown_state, PLAIN)),
        f"  {fmt.clock(view.elapsed_s)}",
    )
    run_id = line((f"  {view.run_id}", QUIET))
    if left.cell_len + run_id.cell_len + right.cell_len < width:
        left.append_text(run_id)
    # What does not fit is cut from the left, and the end of the line stays where it is.
    left.truncate(width - right.cell_len - 1, overflow=overflow)
    return _both_ends(left, right, width)


def _both_ends(left: Text, right: Text, width: int) -> Text:
    left.pad_right(max(1, width - left.cell_len - right.cell_len))
    return left.append_text(right)


def _bar(view: RunView, width: int) -> Table:
    share = min(1.0, max(0.0, view.step / view.max_steps)) if view.max_steps > 0 else 0.0
    total = fmt.count(view.max_steps) if view.max_steps > 0 else "?"
    epoch = "" if view.state == "starting" else f"  epoch {epoch_text(view, view.epoch)}"
    label = (
        f"  {fmt.percent(int(share * 100) / 100):>4}{epoch}  step {fmt.count(view.step)}/{total}"
    )
    if view.doing:
        label = f"  {view.doing} {fmt.clock(view.doing_s)}"
    done = BAD if view.state == "failed" else GOOD
    bar = ProgressBar(
        total=1.0,
        completed=share,
        width=max(_BAR_COLUMNS_MIN, width - len(label) - 1),
        style=QUIET,
        complete_style=done,
        finished_style=done,
    )
    row = Table.grid(Column(width=1), Column(width=bar.width), Column(width=len(label)))
    row.add_row(" ", bar, line(label))
    return row


def _figures(view: RunView, width: int) -> Text:
    speed = "-" if view.samples_per_s is None else fmt.rate(view.samples_per_s)
    pairs = [
        ("loss", "-" if view.loss is None else fmt.figure(view.loss)),
        ("samples/s", speed),
        ("eta", "-" if view.eta_s is None else fmt.duration(view.eta_s)),
    ]
    if view.epochs is None:
        pairs = [("optimizer steps", fmt.count(view.step))]
        if view.doing:
            pairs = [(view.doing, fmt.clock(view.doing_s))]
    if view.stage:
        pairs.insert(0, ("stage", view.stage))
    faults = f"{view.faults_total} fault{'' if view.faults_total == 1 else 's'}"
    restarts = f"{view.restarts} restart{'' if view.restarts == 1 else 's'}"
    right = line((f"{faults}, {restarts}", CARE))
    if view.faults_total == 0 and view.restarts == 0:
        right = line(("no faults", QUIET))
    if view.flops_utilization is not None:
        pairs.append(("of peak", fmt.percent(view.flops_utilization)))
    if view.tokens_per_s is not None:
        pairs.append(("tokens/s", fmt.rate(view.tokens_per_s)))
    left = line()
    for pair in pairs:  # a whole one, or none of it
        labelled = _labelled(*pair)
        if left.cell_len + labelled.cell_len + right.cell_len + 1 > width:
            break
        left.append_text(labelled)
    return _both_ends(left, right, width)


def _labelled(label: str, value: str) -> Text:
    return line((f" {label} ", QUIET), f"{value} ")


def _beside(view: RunView, width: int, *, unicode: bool) -> Iterable[Text]:
    """The lines that are there only where there is something to say, the most important first."""
    faults = view.faults[-_FAULTS_MAX:][::-1]
    yield from (_fault(fault) for fault in faults[:1])
    if view.nodes:
        yield _nodes(view)
    yield from _slow(view)
    if view.evaluated:
        yield _evaluated(view, width)
    if len(view.losses) >= _CURVE_POINTS_MIN:
        yield _curve(view, width, unicode=unicode)
    yield from (_fault(fault) for fault in faults[1:])


def _fault(fault: FaultView) -> Text:
    is_open = fault.repaired_s is None
    repair = "not repaired" if is_open else f"repaired in {fmt.duration(fault.repaired_s or 0.0)}"
    if fault.is_being_repaired:
        repair = "being repaired"
    return line(
        (" fault ", QUIET),
        (f"{fmt.duration(fault.age_s)} ago  ", CARE if is_open else PLAIN),
        (f"{repair}  ", CARE if is_open else GOOD),
        f"step {fmt.count(fault.step)}: {fault.text}",
    )


def _nodes(view: RunView) -> Text:
    """The other machines, where there are many those that are gone and the farthest; the display is the coordinator's."""
    members = [node for node in view.nodes if node.number >= 0]
    spares = [node for node in view.nodes if node.number < 0]
    gone = [node for node in members if not node.is_there]
    there = [node for node in members if node.is_there]
    parts: list[Cell | str] = [
        (" nodes ", QUIET),
        f"{len(there) + 1} of {len(members) + 1} are there",
    ]
    named = gone[:_NODES_NAMED_MAX]
    parts += [(f", node {node.number} is not{_losses(node)}", BAD) for node in named]
    if len(gone) > _NODES_NAMED_MAX:
        parts.append((f" and {len(gone) - _NODES_NAMED_MAX} more", BAD))
    if len(there) <= _NODES_NAMED_MAX:
        parts += [f", node {node.number} {node.host}{_trip(node)}" for node in there]
    else:
        far = max(there, key=lambda node: node.round_trip_s or 0.0)
        parts.append(f", the farthest is node {far.number} {far.host}{_trip(far)}")
    if spares:
        parts.append(f", {len(spares)} more wait{'s' if len(spares) == 1 else ''} for a place")
    return line(*parts)


def _losses(node: NodeView) -> str:
    if not node.losses:
        return ""
    out = f", left out for {fmt.duration(node.left_out_s)}" if node.left_out_s else ""
    return f" (lost {'once' if node.losses == 1 else f'{node.losses} times'}{out})"


def _trip(node: NodeView) -> str:
    return "" if node.round_trip_s is None else f" {node.round_trip_s * 1000:.1f} ms"


def _slow(view: RunView) -> Iterable[Text]:
    """Yield lines on slow ranks, ranks that wait for data, and GPUs in trouble; none if all is well."""
    words: list[Cell] = []
    waits = [(rank.data_wait_share or 0.0, rank.rank) for rank in view.ranks]
    share, rank = max(waits, default=(0.0, 0))
    if share >= DATA_WAIT_MANY:
        words.append((f"rank {rank} waits {fmt.percent(share)} of a step for data  ", CARE))
    for slow, factor in sorted(view.stragglers.items(), key=lambda one: -one[1])[:2]:
        words.append((f"rank {slow} takes {factor:.1f} times as long  ", CARE))
    if words:
        yield line((" slow ", QUIET), *words)
    trouble = gpu_trouble(view)
    if trouble:
        first = min(trouble)
        more = f" and {len(trouble) - 1} more" if len(trouble) > 1 else ""
        yield line((" gpu ", QUIET), (f"rank {first}{more}: {trouble[first].said}", CARE))
    oldest_s = max((gpu.age_s or 0.0 for gpu in view.gpus), default=0.0)
    if oldest_s >= _STALE_S:
        said = f"the driver's last reading is {fmt.duration(oldest_s)} old"
        yield line((" gpu ", QUIET), (said, CARE))


def _evaluated(view: RunView, width: int) -> Text:
    """The figures of the newest evaluation: as many as fit whole, how many more there are, and of which step."""
    shown = line((" evaluated", QUIET))
    left = len(view.evaluated)
    for name, value in view.evaluated.items():
        labelled = _labelled(name, fmt.figure(value))
        wanted = shown.cell_len + labelled.cell_len + (_MORE_COLUMNS if left > 1 else 0)
        if wanted > width and left < len(view.evaluated):
            break
        shown.append_text(labelled)
        left -= 1
    if left:
        shown.append(f" and {left} more ", QUIET)
    when = line((f" after step {fmt.count(view.evaluated_step or 0)}", QUIET))
    return shown.append_text(when) if shown.cell_len + when.cell_len <= width else shown


def _curve(view: RunView, width: int, *, unicode: bool) -> Text:
    losses = [loss for _, loss in view.losses]
    # The newest loss may not be among the points yet.
    first, low = (
        fmt.figure(losses[0]),
        fmt.figure(min(losses if view.loss is None else [*losses, view.loss])),
    )
    label = f"  from {first}, lowest {low}"
    room = min(_CURVE_COLUMNS_MAX, width - len(label) - 7)
    means = by_steps(view.losses, stretches=max(2, room))
    curve = sparkline(means, columns=len(means), unicode=unicode)
    return line((" loss ", QUIET), (curve, GOOD), (label, QUIET))
