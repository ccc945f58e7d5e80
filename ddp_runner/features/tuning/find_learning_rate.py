"""``--find-lr``: a range test of the learning rate on a copy of the run's state; the run is left as it is."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_runner.checkpoint.catalog import Catalog, Entry
from ddp_runner.cli.scratch import in_temporary_folder, say_now
from ddp_runner.cli.stage_choice import alone
from ddp_runner.config import aligned, difference, resume_key, task_resume_key
from ddp_runner.features.tuning.lr_range import Curve, Point, Suggestion, curve_of, suggestion
from ddp_runner.features.tuning.trials import refuse_ranks, steps_of, train
from ddp_runner.features.tuning.words import LEARNING_RATE
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.system.run_files import replace_file
from ddp_runner.observe.format import figure, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import psutil

    from ddp_runner.cli.parser import Finding, TrainArguments
    from ddp_runner.core.launch_plan import LaunchPlan


FILE_NAME = "lr_find.json"
STEPS_MIN = 30
_REST_FACTOR = 10  # times the length of a look, between two


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The range of the test: from ``low`` at the first of ``steps`` to ``high`` at the last."""

    low: float = 1e-7
    high: float = 10.0
    steps: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The start of the test. ``path`` is empty for the initial weights."""

    path: str = ""
    step: int = 0


def perform(plan: LaunchPlan, arguments: TrainArguments, *, is_rank: bool) -> int:
    """Look for it, in the first stage of a run in stages; the exit code. Raises BadInputError."""
    refuse_ranks(arguments, is_rank=is_rank)
    plan, finding = alone(plan), arguments.finding
    test = _Test(plan, finding, tested=range_of(finding.value), begin=begin_of(plan))
    return in_temporary_folder("find-lr", test.perform, keep=False, keeps_failed=False)


def range_of(text: str) -> Range:
    """``LOW:HIGH`` and ``LOW:HIGH:STEPS``. Raises BadInputError."""
    if not text:
        return Range()
    low, _, rest = text.partition(":")
    high, _, steps = rest.partition(":")
    try:
        found = Range(low=float(low), high=float(high), steps=int(steps or Range().steps))
        is_right = 0 < found.low < found.high < math.inf and found.steps >= STEPS_MIN
    except ValueError:
        is_right = False
    if not is_right:
        expected = (
            "must be LOW:HIGH or LOW:HIGH:STEPS with 0 < LOW < HIGH and"
            f" {STEPS_MIN} steps or more, such as 1e-6:1:200"
        )
        raise BadInputError(LEARNING_RATE, text, expected)
    return found


def begin_of(plan: LaunchPlan) -> Begin:
    """The checkpoint that a ``--resume`` names; without that option nothing is read."""
    run = plan.settings.run
    if plan.origins["run.resume"] in ("default", "preset"):
        return Begin()
    # INVARIANT tested-on-a-copy: a range test reads the checkpoint that it begins with, and leaves the
    # folder of the run as it is. Broken if: its runs are given that folder for anything but --resume.
    # Guarded by: test_a_range_test_begins_with_a_checkpoint_and_leaves_the_run.
    entries = Catalog(Path(run.checkpoint_dir)).resolve(run.resume)
    if entries:
        _refuse_other_run(plan, entries[0])
        return Begin(path=str(entries[0].path.absolute()), step=entries[0].step)
    if run.resume in ("auto", "none"):
        return Begin()
    expected = f"there is no checkpoint in {run.checkpoint_dir}; leave it out to test a fresh start"
    raise BadInputError("--resume", run.resume, expected)


def _refuse_other_run(plan: LaunchPlan, entry: Entry) -> None:
    """Refuse a checkpoint of a run with other settings, with a cure that does not name the test's folders."""
    settings = plan.settings
    old = {} if entry.manifest is None else entry.manifest.meaning
    key_now = resume_key(settings, world_size=plan.computing_devices)
    given = {**key_now, **task_resume_key(settings, like=old)}
    new = aligned(old, {key: v for key, v in given.items() if key in old})
    if changes := difference({key: old[key] for key in new}, new):
        expected = (
            f"{entry.path} is of a run with other settings ({'; '.join(changes)}): give the same, or leave"
            " it out to test a fresh start"
        )
        raise BadInputError("--resume", settings.run.resume, expected)


class _Test:
    """One range test, in one folder."""

    def __init__(self, plan: LaunchPlan, finding: Finding, *, tested: Range, begin: Begin) -> None:
        self._plan = plan
        self._words = finding.words
        self._range = tested
        self._begin = begin
        self._log_dir = Path()
        self._look_s = 0.0  # when to look next
        self._has_exploded = False

    def perform(self, folder: Path) -> ExitCode:
        """Train, draw, write the file."""
        tested, begin = self._range, self._begin
        end = begin.step + tested.steps
        start = f"from step {begin.step:,}" if begin.path else "from the first weights"
        say_now(
            f"find-lr: {tested.steps} steps on {self._plan.world_size}"
            f" rank{'s' * (self._plan.world_size > 1)}, {start}, at rates from {tested.low:g} to"
            f" {tested.high:g}"
        )
        self._log_dir = folder / "logs"
        trial = train(
            self._words,
            "optim.schedule=range_test",
            f"optim.min_learning_rate={tested.low!r}",
            f"optim.learning_rate={tested.high!r}",
            "optim.warmup_steps=0",
            f"optim.decay_steps={tested.steps}",
            f"optim.schedule_steps={end}",
            f"run.max_steps={end}",
            f"run.resume={begin.path or 'none'}",
            ranks=self._plan.computing_devices,
            folder=folder,
            look=self._look,
        )
        curve = curve_of(self._points())
        if not curve.exploded and trial.exit_code != ExitCode.DONE:
            return trial.show_failure()
        return self._show(curve)

    def _look(self, run: psutil.Process) -> bool:
        """Return whether the loss has exploded; it is computed only now and then, so as not to slow a long test."""
        del run
        began_s = time.monotonic()
        if began_s < self._look_s:
            return self._has_exploded
        self._has_exploded = curve_of(self._points()).exploded
        now_s = time.monotonic()
        self._look_s = now_s + _REST_FACTOR * (now_s - began_s)
        return self._has_exploded

    def _points(self) -> list[Point]:
        """The loss and the rate of each step, which all ranks have alike."""
        return [
            Point(rate=float(ranks[0]["learning_rate"]), loss=ranks[0]["loss"])
            for ranks in steps_of(self._log_dir).values()
        ]

    def _show(self, curve: Curve) -> ExitCode:
        if not curve.points:
            print("ddp_runner: error: the loss is not finite at the first step", file=sys.stderr)
            return ExitCode.FAILED
        found = suggestion(curve)
        marks = {}
        if found is not None:
            marks = {"M": found.tenth, "S": found.steepest, "V": found.valley}
        _print_chart([(one.rate, one.smoothed) for one in curve.points], marks)
        count, last = len(curve.points), curve.points[-1]
        say_now(
            f"the loss exploded after {count} steps, beyond a rate of {last.rate:.2g}"
            if curve.exploded
            else f"the loss did not explode in {count} steps, up to a rate of {last.rate:.2g}"
        )
        if found is None:
            say_now("no suggestion: the smoothed loss has not fallen at any rate")
        else:
            say_now(f"  S  {found.steepest:.2e}  where the loss falls fastest")
            say_now(f"  V  {found.valley:.2e}  in the middle of its longest fall")
            say_now(f"  M  {found.tenth:.2e}  a tenth of the rate at which it is lowest")
            say_now("to use the middle one of them:")
            say_now(f"    learning_rate={found.rate:g}")
        is_written = self._write(curve, found)
        return ExitCode.DONE if is_written and found is not None else ExitCode.FAILED

    def _write(self, curve: Curve, found: Suggestion | None) -> bool:
        """Write the curve to a file next to the run's logs; False if it cannot be written."""
        record: dict[str, Any] = {
            "task": self._plan.settings.run.task,
            "ranks": self._plan.world_size,
            "begun_from": self._begin.path or self._plan.settings.run.init_from or None,
            "begun_step": self._begin.step,
            **asdict(self._range),
            "exploded": curve.exploded,
            "suggestion": None if found is None else {**asdict(found), "learning_rate": found.rate},
            "points": [asdict(one) for one in curve.points],
        }
        folder = Path(self._plan.settings.run.log_dir)
        file = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(file, (json.dumps(record, indent=1) + "\n").encode())
        except OSError as error:
            reason = error.strerror or error
            print(f"ddp_runner: error: {file} cannot be written: {reason}", file=sys.stderr)
            return False
        say_now(printable(f"all points: {file}"))
        return True


def _print_chart(points: list[tuple[float, float]], marks: dict[str, float]) -> None:
    from rich.console import Console  # noqa: PLC0415 - rich is big
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    glyphs = UNICODE if "utf" in console.encoding.lower() else ASCII
    for line in chart(points, marks=marks, glyphs=glyphs):
        console.print(Text(line), soft_wrap=True)
    sys.stdout.flush()


# Draws losses over learning rates with characters, and says where which rate is. Pure.

COLUMNS, ROWS = 64, 14
_LABEL = 9  # columns of the losses at the left
_HEADROOM = 1.3  # above the first loss, in units of what the loss falls; what is higher is cut


# The characters of a point, of the left side, of the floor and of the corner between.
UNICODE, ASCII = tuple("•│─└"), tuple("*|-+")


def chart(
    points: Sequence[tuple[float, float]], *, marks: Mapping[str, float], glyphs: Sequence[str]
) -> list[str]:
    """Lines of at most 79 columns: ``points`` are rates, growing, and losses; ``marks``: a letter for a rate."""
    if not points:
        return []
    point, side, floor_line, corner = glyphs
    low, high = math.log10(points[0][0]), math.log10(points[-1][0])
    losses = [loss for _, loss in points]
    bottom = min(losses)
    top = min(max(losses), bottom + _HEADROOM * (losses[0] - bottom))
    if top <= bottom:
        top = max(losses)

    def column(rate: float) -> int:
        share = (math.log10(rate) - low) / (high - low) if high > low else 0.0
        return round(max(0.0, min(1.0, share)) * (COLUMNS - 1))

    def row(loss: float) -> int:
        share = (top - loss) / (top - bottom) if top > bottom else 1.0
        return round(max(0.0, min(1.0, share)) * (ROWS - 1))

    grid = [[" "] * COLUMNS for _ in range(ROWS)]
    for rate, loss in points:
        grid[row(loss)][column(rate)] = point
    labels = {0: figure(top), ROWS - 1: figure(bottom)}
    lines = [
        f"{labels.get(number, ''):>{_LABEL}} {side}{''.join(cells)}".rstrip()
        for number, cells in enumerate(grid)
    ]
    floor = [floor_line] * COLUMNS
    for letter, rate in marks.items():
        floor[column(rate)] = letter
    lines.append(f"{'loss':>{_LABEL}} {corner}{''.join(floor)}")
    lines.append(" " * (_LABEL + 2) + _scale(low, high, column))
    return lines


def _scale(low: float, high: float, column: Callable[[float], int]) -> str:
    """Powers of ten below the floor, each at its place as far as there is room."""
    text = ""
    for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1):
        label = f"1e{power}"
        place = min(column(10.0**power), COLUMNS - len(label))
        if place >= len(text) + bool(text):
            text += " " * (place - len(text)) + label
    return text or "learning rate"
