"""``bench``: runs a few steps next to the real run, and reports the parts of a step's time, its bottleneck and what to try."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ddp_runner.cli.command import JSON, Arguments, SmallCommand, show
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.cli.scratch import in_temporary_folder, say_now
from ddp_runner.core.plain_rank import plain_rank
from ddp_runner.core.settings.declaration import Option
from ddp_runner.core.step_times import STEP, Part, Verdict, judge, parts_of, slowness
from ddp_runner.features.tuning.trials import steps_of, train
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.start import COMMAND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ddp_runner.core.launch_plan import LaunchPlan

STEPS, WARM_UP = 30, 5
_STEPS_MIN, _STEPS_MAX = 5, 10_000
_STEPS = "--steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The words of train, and the options of ``bench``."""

    words: tuple[str, ...]
    steps: int = STEPS
    is_json: bool = False

    @classmethod
    def by(cls, arguments: Arguments) -> Asked:
        """Read the options. Raises BadInputError."""
        text = arguments.values.get(_STEPS, str(STEPS))
        return cls(
            words=arguments.words, steps=_steps(text), is_json=JSON.long in arguments.switches
        )


def _run(given: Arguments) -> int:
    """Measure and show; the exit code. Raises BadInputError."""
    asked = Asked.by(given)
    arguments = parse_train(asked.words)
    others = [one for one in arguments.nodes if one != ("--nnodes", "1")]
    if plain_rank(os.environ) is not None or others:
        raise BadInputError("bench", "", "is for one machine, and starts its ranks itself")
    if arguments.instead:
        raise BadInputError(arguments.instead, "", "and bench are two commands: give one of them")
    plan = plan_launch(arguments, words=asked.words)
    if plan.nodes is not None:
        raise BadInputError("bench", "", "is for one machine: give --nnodes 1 with it")
    bench = _Bench(plan, asked)
    return in_temporary_folder(
        "bench", bench.perform, keep=False, keeps_failed=False, say=_to_standard_error
    )


def _steps(text: str) -> int:
    if not text.isdecimal() or not _STEPS_MIN <= int(text) <= _STEPS_MAX:
        expected = f"must be a whole number from {_STEPS_MIN} to {_STEPS_MAX}"
        raise BadInputError(_STEPS, text, expected)
    return int(text)


def _to_standard_error(text: str) -> None:
    print(text, file=sys.stderr)


class _Bench:
    """One measurement, in one folder."""

    def __init__(self, plan: LaunchPlan, asked: Asked) -> None:
        self._plan = plan
        self._asked = asked

    def perform(self, folder: Path) -> ExitCode:
        """Train, then show."""
        if not self._asked.is_json:
            ranks = self._plan.world_size
            say_now(
                f"bench: {self._asked.steps} steps after {WARM_UP} on {ranks} rank{'s' * (ranks > 1)}"
                f" ({self._plan.mode})"
            )
        trial = train(
            self._asked.words,
            f"run.max_steps={WARM_UP + self._asked.steps}",
            "run.resume=none",
            "log.phase_times=true",
            "recovery.warm_spare=false",
            ranks=self._plan.computing_devices,
            folder=folder,
            look=lambda _: False,
        )
        records = measured(trial.log_dir)
        if trial.exit_code != ExitCode.DONE or not records:
            return trial.show_failure()
        self._show(records)
        return ExitCode.DONE

    def _show(self, records: Sequence[Mapping[str, float]]) -> None:
        parts = parts_of(records)
        settings = self._plan.settings
        if self._plan.devices[0].others:  # also where that was chosen here
            settings = replace(settings, run=replace(settings.run, mode="data_parallel"))
        verdict = judge(
            parts,
            settings,
            ranks=self._plan.world_size,
            is_on_gpu=self._plan.devices[0].visible_index is not None,
            slow=slowness(records),
        )
        if self._asked.is_json:
            found = {"parts": [asdict(part) for part in parts], **asdict(verdict)}
            print(json.dumps(found))
            return
        for line in table(parts, verdict):
            show(line)


def measured(log_dir: Path) -> list[dict[str, Any]]:
    """A record for each step and rank, those of the first steps left out."""
    steps = steps_of(log_dir)
    return [one for step, records in steps.items() if step > WARM_UP for one in records]


def table(parts: Sequence[Part], verdict: Verdict) -> list[str]:
    """The lines that people read."""
    lines = ["", f" {'ms a step':<15}{'median':>9}{'middle half':>20}{'share':>8}"]
    for part in parts:
        name = "the step" if part.name == STEP else part.name.removesuffix("_ms")
        spread = f"{part.low_ms:.2f} to {part.high_ms:.2f}"
        lines.append(f" {name:<15}{part.median_ms:>9.2f}{spread:>20}{part.share:>8.0%}")
    lines += ["", f" bound by {verdict.bound}: {verdict.why}", " to try:"]
    return [*lines, *(f"   {words:<28} {why}" for words, why in verdict.tries)]


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} bench [OPTIONS of train] [--steps N] [--json]

Trains some steps in a separate folder, with the settings and devices of train.
Shows the time of each part of a step (data, forward, backward, communication,
optimizer), the part that limits the speed, and settings to try. An existing
run is not touched.""",
    options=(
        Option(
            _STEPS,
            metavar="N",
            says=f"steps that are measured, after {WARM_UP} that are not [{STEPS}]",
        ),
        replace(JSON, says="print one JSON object, for programs"),
    ),
    takes_rest=True,
    perform=_run,
)
