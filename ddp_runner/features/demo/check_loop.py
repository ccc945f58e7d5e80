"""The runs of ``check --loop``: each runs a whole program whose loop calls ``attach()``, with its own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.cli.from_code.launch import RunResult, run_child
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import from_json, read_small

LOOP = "--loop"
_PHASE_OF_TASKS = "phase=backward"  # a loop does not report it
_SETS = {
    *("-l", "--log-dir", "log_dir", "run.log_dir"),
    *("-c", "--checkpoint-dir", "checkpoint_dir", "run.checkpoint_dir"),
    *("-r", "--resume", "resume", "run.resume"),
    *("--inject", "inject", "run.inject"),
}


def cut_at_program(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``words`` at ``--loop``: all words after its file are the program's. Raises BadInputError."""
    for number, word in enumerate(words):
        if word == LOOP or word.startswith(f"{LOOP}="):
            file = [word.removeprefix(f"{LOOP}=")] if "=" in word else list(words[number + 1 :][:1])
            if not file:
                raise BadInputError(LOOP, "", "needs a value: FILE.py is what is checked")
            rest = list(words[number + 1 + ("=" not in word) :])
            return list(words[:number]), [*file, *rest]
    return list(words), []


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRuns:
    """Runs the program. ``options``: the options of ``run``; ``program``: the file and its arguments."""

    options: Sequence[str]
    program: Sequence[str]

    unexplained = (
        "the weights differ, although the run reports itself as exact: the loop keeps state that was not passed to"
        " run.keep(), such as a global that its body changes"
    )

    def refuse_set(self) -> None:
        """Raise BadInputError for an option that check sets itself."""
        for word in self.options:
            name = word.partition("=")[0].replace("_", "-" if word.startswith("--") else "_")
            if name in _SETS:
                raise BadInputError(name, "", "is set by check itself: leave it out")
        if not Path(self.program[0]).is_file():
            raise BadInputError(
                LOOP, self.program[0], "is no file: give FILE.py, and its arguments"
            )
        in_place = any(word.replace("_", "-") == "--in-place" for word in self.options)
        if not in_place and b"ddp_runner" not in Path(self.program[0]).read_bytes():
            expected = "does not call ddp_runner.attach(), which this check needs"
            raise BadInputError(LOOP, self.program[0], expected)

    def kills(self, known: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return those of the ``known`` kills that can happen in a loop."""
        return [(what, spec) for what, spec in known if _PHASE_OF_TASKS not in spec]

    def start(self, folder: Path, settings: Sequence[str]) -> RunResult:
        """Run the program once, in its working folder; logs and checkpoints are below ``folder``."""
        logs, checkpoints = folder / "logs", folder / "checkpoints"
        summary = logs / "summary.json"
        summary.unlink(missing_ok=True)  # of an earlier run in this folder
        words = [
            *("-n", "2"),
            *self.options,
            *(f"--log-dir={logs}", f"--checkpoint-dir={checkpoints}"),
            *settings,
            *self.program,
        ]
        code = run_child("run", words)
        return RunResult(
            exit_code=code,
            summary=from_json(read_small(summary)) if summary.is_file() else None,
            log_dir=logs,
            checkpoint_dir=checkpoints,
        )

    def steps_of(self, result: RunResult, *, least: int) -> int:
        """Return the number of steps of a finished run. Raises BadInputError for a program that cannot be checked."""
        summary = result.summary or {}
        if not summary.get("weights_sha256"):
            raise BadInputError(
                LOOP,
                self.program[0],
                "has no loop that calls ddp_runner.attach(): nothing was trained",
            )
        steps = int(summary["steps"])
        if steps < least:
            expected = f"makes only {steps} steps: give it arguments for at least {least}, as the kills happen at different steps"
            raise BadInputError(LOOP, self.program[0], expected)
        return steps
