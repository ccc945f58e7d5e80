"""Layout of the live display: a view and a size in, lines of coloured spans out. Draws nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_runner.observe import format as fmt
from ddp_runner.observe.frame_spans import (
    ROLE_OF_STATE,
    UNICODE,
    Glyphs,
    Line,
    Role,
    Span,
    cut,
    spread,
)
from ddp_runner.observe.frame_table import rank_table
from ddp_runner.observe.loss_history import by_steps
from ddp_runner.observe.reports.text_charts import sparkline
from ddp_runner.observe.unusual import DATA_WAIT_MANY, gpu_trouble

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddp_runner.observe.view import FaultView, NodeView, RunView

WIDTH_MIN = 40
_WIDTH_MAX = 120  # wider lines are harder to read, not easier
_TABLE_LINES_MIN = 4
_ROWS_KEPT = 7  # of ranks, before there are lines about older faults
_NODES_NAMED_MAX = 3
_FAULTS_MAX = 3
_CURVE_COLUMNS_MAX = 60
_MORE_COLUMNS = len(" and 99 more ")
_STALE_S = 20.0  # a driver's last word is that old: it is said
_LINES_ALWAYS = 6  # blank, header, bar, figures, blank, titles


def frame(view: RunView, *, width: int, lines_max: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """The display as at most ``lines_max`` lines (10 at least) of at most ``width`` columns."""
    width = max(WIDTH_MIN, min(width - 1, _WIDTH_MAX))
    lines_max = max(_LINES_ALWAYS + _TABLE_LINES_MIN, lines_max)
    lines = [[], _header(view, width), _bar(view, width, glyphs), _figures(view, width)]
    # What there is to say beside goes before rows of ranks, but for some that are always there.
    rows = min(len(view.ranks), _ROWS_KEPT)
    for line in _beside(view, width, glyphs):
        if len(lines) + 2 + rows < lines_max:
            lines.append(cut(line, width))
    lines.append([])
    table = rank_table(view, width=width, lines_max=lines_max - len(lines))
    return [*lines, *(cut(line, width) for line in table)]


def _header(view: RunView, width: int) -> Line:
    left = [Span(f" {view.title}", Role.STRONG), Span(f"  {view.run_id}", Role.QUIET)]
    right = [
        Span(view.state, ROLE_OF_STATE.get(view.state, Role.PLAIN)),
        Span(f"  generation {view.generation}  ", Role.QUIET),
        Span(fmt.clock(view.elapsed_s)),
    ]
    return spread(left, right, width)


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
    if view.stage:
        pairs.insert(0, ("stage", view.stage))
    faults = f"{view.faults_total} fault{'' if view.faults_total == 1 else 's'}"
    restarts = f"{view.restarts} restart{'' if view.restarts == 1 else 's'}"
    right = Span(f"{faults}, {restarts}", Role.CARE)
    if view.faults_total == 0 and view.restarts == 0:
        right = Span("no faults", Role.QUIET)
    if view.flops_utilization is not None:
        pairs.append(("of peak", fmt.percent(view.flops_utilization)))
    if view.tokens_per_s is not None:
        pairs.append(("tokens/s", fmt.rate(view.tokens_per_s)))
    left: Line = []
    room = width - len(right.text) - 1
    for pair in pairs:  # a whole one, or none of it
        labelled = _labelled(*pair)
        room -= sum(len(span.text) for span in labelled)
        left += labelled if room >= 0 else []
    return spread(left, [right], width)


def _labelled(label: str, value: str) -> Line:
    return [Span(f" {label} ", Role.QUIET), Span(f"{value} ")]


def epoch_text(view: RunView) -> str:
    """``2/10``, or ``2`` where the run goes by steps."""
    if not view.epochs:
        return str(view.epoch + 1)
    return f"{min(view.epoch + 1, view.epochs)}/{view.epochs}"


def _beside(view: RunView, width: int, glyphs: Glyphs) -> Iterable[Line]:
    """The lines that are there only where there is something to say, the most important first."""
    faults = view.faults[-_FAULTS_MAX:][::-1]
    yield from (_fault(fault) for fault in faults[:1])
    if view.nodes:
        yield _nodes(view)
    yield from _slow(view)
    if view.evaluated:
        yield _evaluated(view, width)
    if len(view.losses) > 1:
        yield _curve(view, width, glyphs)
    yield from (_fault(fault) for fault in faults[1:])


def _fault(fault: FaultView) -> Line:
    is_open = fault.repaired_s is None
    repair = "not repaired" if is_open else f"repaired in {fmt.duration(fault.repaired_s or 0.0)}"
    if fault.is_being_repaired:
        repair = "being repaired"
    return [
        Span(" fault ", Role.QUIET),
        Span(f"{fmt.duration(fault.age_s)} ago  ", Role.CARE if is_open else Role.PLAIN),
        Span(f"{repair}  ", Role.CARE if is_open else Role.GOOD),
        Span(f"step {fmt.count(fault.step)}: {fault.text}"),
    ]


def _nodes(view: RunView) -> Line:
    """The other machines, where there are many those that are gone and the farthest; the display is the coordinator's."""
    members = [node for node in view.nodes if node.number >= 0]
    spares = [node for node in view.nodes if node.number < 0]
    gone = [node for node in members if not node.is_there]
    there = [node for node in members if node.is_there]
    line = [Span(" nodes ", Role.QUIET), Span(f"{len(there) + 1} of {len(members) + 1} are there")]
    named = gone[:_NODES_NAMED_MAX]
    line += [Span(f", node {node.number} is not{_losses(node)}", Role.BAD) for node in named]
    if len(gone) > _NODES_NAMED_MAX:
        line.append(Span(f" and {len(gone) - _NODES_NAMED_MAX} more", Role.BAD))
    if len(there) <= _NODES_NAMED_MAX:
        line += [Span(f", node {node.number} {node.host}{_trip(node)}") for node in there]
    else:
        far = max(there, key=lambda node: node.round_trip_s or 0.0)
        line.append(Span(f", the farthest is node {far.number} {far.host}{_trip(far)}"))
    if spares:
        line.append(Span(f", {len(spares)} more wait{'s' if len(spares) == 1 else ''} for a place"))
    return line


def _losses(node: NodeView) -> str:
    if not node.losses:
        return ""
    out = f", left out for {fmt.duration(node.left_out_s)}" if node.left_out_s else ""
    return f" (lost {'once' if node.losses == 1 else f'{node.losses} times'}{out})"


def _trip(node: NodeView) -> str:
    return "" if node.round_trip_s is None else f" {node.round_trip_s * 1000:.1f} ms"


def _slow(view: RunView) -> Iterable[Line]:
    """Who is slow or waits for data, and GPUs that something is wrong with; nothing where all is well."""
    words: Line = []
    waits = [(rank.data_wait_share or 0.0, rank.rank) for rank in view.ranks]
    share, rank = max(waits, default=(0.0, 0))
    if share >= DATA_WAIT_MANY:
        words.append(
            Span(f"rank {rank} waits {fmt.percent(share)} of a step for data  ", Role.CARE)
        )
    for slow, factor in sorted(view.stragglers.items(), key=lambda one: -one[1])[:2]:
        words.append(Span(f"rank {slow} takes {factor:.1f} times as long  ", Role.CARE))
    if words:
        yield [Span(" slow ", Role.QUIET), *words]
    trouble = gpu_trouble(view)
    if trouble:
        first = min(trouble)
        more = f" and {len(trouble) - 1} more" if len(trouble) > 1 else ""
        text = f"rank {first}{more}: {trouble[first].said}"
        yield [Span(" gpu ", Role.QUIET), Span(text, Role.CARE)]
    oldest_s = max((gpu.age_s or 0.0 for gpu in view.gpus), default=0.0)
    if oldest_s >= _STALE_S:
        text = f"the driver's last reading is {fmt.duration(oldest_s)} old"
        yield [Span(" gpu ", Role.QUIET), Span(text, Role.CARE)]


def _evaluated(view: RunView, width: int) -> Line:
    """The figures of the newest evaluation: as many as fit whole, how many more there are, and of which step."""
    line = [Span(" evaluated", Role.QUIET)]
    left = len(view.evaluated)
    for name, value in view.evaluated.items():
        labelled = _labelled(name, fmt.figure(value))
        wanted = _columns([*line, *labelled]) + (_MORE_COLUMNS if left > 1 else 0)
        if wanted > width and left < len(view.evaluated):
            break
        line += labelled
        left -= 1
    if left:
        line.append(Span(f" and {left} more ", Role.QUIET))
    when = Span(f" after step {fmt.count(view.evaluated_step or 0)}", Role.QUIET)
    return [*line, when] if _columns([*line, when]) <= width else line


def _columns(line: Line) -> int:
    return sum(len(span.text) for span in line)


def _curve(view: RunView, width: int, glyphs: Glyphs) -> Line:
    losses = [loss for _, loss in view.losses]
    first, low = fmt.figure(losses[0]), fmt.figure(min(losses))
    label = f"  from {first}, lowest {low}"
    room = min(_CURVE_COLUMNS_MAX, width - len(label) - 7)
    means = by_steps(view.losses, stretches=max(2, room))
    curve = sparkline(means, columns=len(means), unicode=glyphs.unicode)
    return [Span(" loss ", Role.QUIET), Span(curve, Role.GOOD), Span(label, Role.QUIET)]
