"""``check``: proves on a user's own task that nothing is lost, and that the weights stay the same.

Short runs in a temporary folder: without faults, under kills in each phase, stopped and resumed. The
faults are real; what is reported of them is read from the runs' journals and summaries.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ddp_runner.cli.command import JSON, Arguments, SmallCommand
from ddp_runner.cli.from_code.launch import RunResult, launch
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.scratch import in_temporary_folder
from ddp_runner.core.settings.declaration import Option
from ddp_runner.features.demo.check_loop import LOOP, LoopRuns, cut_at_program
from ddp_runner.features.demo.tables import show_checked
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.start import COMMAND

if TYPE_CHECKING:
    from collections.abc import Iterator

KEEP = "--keep"
STEPS, STEPS_MIN = 30, 20

# What is lost is one rank, the last one, unless it says so; in the order in which it happens.
KILLS = (
    ("a rank killed while it loads", "kill:phase=data"),
    ("a rank killed in forward", "kill:phase=forward"),
    ("a rank killed in backward", "kill:phase=backward"),
    ("a rank killed in the reduction", "kill:phase=reduce"),
    ("a rank killed before its optimizer", "kill:phase=optimizer"),
    ("a rank killed inside its optimizer", "kill:phase=commit"),
    ("rank 0 killed in a save", "kill:rank=0,phase=checkpoint"),
    ("all ranks killed", "kill:rank=all,phase=forward"),
)
_STOPPED = "stopped and resumed"
# At which step a stop comes is seen from outside; so long the step takes, for that.
_STOP_S = 1.0
_LOOK_S = 0.02
_OURS = ("--log-dir", "--checkpoint-dir", "--resume", "--inject")
_OUR_KEYS = ("run.log_dir", "run.checkpoint_dir", "run.resume", "run.inject")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A row of the table. ``seconds``: of the run, or from a kill until every rank trained again.

    ``says``: why it does not hold, or what else there is to say.
    """

    what: str
    holds: bool
    seconds: float | None
    says: str = ""


def _run(arguments: Arguments) -> int:
    """Check it; 0 if all holds. Raises BadInputError."""
    options, program = cut_at_program(arguments.words)
    as_json, keep = JSON.long in arguments.switches, KEEP in arguments.switches
    talk = _Talk(to_stderr=as_json)
    if program:
        loop = LoopRuns(options=options, program=program)
        loop.refuse_set()
        check = _Check(loop, steps=0, talk=talk, as_json=as_json)
        return in_temporary_folder("check", check.perform, keep=keep, say=talk.say)
    parsed = parse_train(arguments.words)
    if parsed.page:
        print(DECLARATION.help())
        return ExitCode.DONE
    if parsed.is_dry:
        raise BadInputError("--dry-run", "", "trains nothing that could be checked: leave it out")
    if parsed.finding.option:
        raise BadInputError(parsed.finding.option, "", "is a command of its own: leave it out")
    given = {name.removeprefix("--").replace("-", "_"): text for name, text in parsed.assignments}
    for name in given:
        refused = {key for long in (*_OURS, *_OUR_KEYS) for key in _spellings(long)}
        if name in refused:
            raise BadInputError(name, "", "is set by check itself: leave it out")
    if not parsed.files and not {"task", "run.task"} & given.keys():
        raise BadInputError("--task", "", "is needed: FILE.py:NAME is what is checked")
    steps = _steps(given)
    task = _TaskRuns(words=arguments.words, steps=steps)
    check = _Check(task, steps=steps, talk=talk, as_json=as_json)
    return in_temporary_folder("check", check.perform, keep=keep, say=talk.say)


def _spellings(name: str) -> tuple[str, str]:
    plain = name.removeprefix("--").replace("-", "_")
    return plain, plain.removeprefix("run.")


def _steps(given: Mapping[str, str]) -> int:
    text = next((given[name] for name in ("run.max_steps", "max_steps") if name in given), "")
    if text and not (text.isdecimal() and int(text) >= STEPS_MIN):
        expected = f"must be {STEPS_MIN} or more: each kill needs steps of its own"
        raise BadInputError("--max-steps", text, expected)
    return int(text or STEPS)


class _Talk:
    """Prints progress for people; with ``--json`` to stderr, since stdout is for programs."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._stream = sys.stderr if to_stderr else sys.stdout

    def say(self, text: str) -> None:
        print(text, file=self._stream)
        self._stream.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A finished run: its result, its duration and its output."""

    result: RunResult
    seconds: float
    output: str

    @property
    def error(self) -> str:
        """Its error line, or how it ended."""
        lines = [line for line in self.output.splitlines() if "error: " in line]
        if lines:
            return lines[-1].partition("error: ")[2]
        return f"its run ended with exit code {self.result.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskRuns:
    """Runs a task. ``words``: the arguments of ``train``."""

    words: tuple[str, ...]
    steps: int

    unexplained = (
        "the weights differ, although the run reports itself as exact: the task keeps state outside its"
        " model and optimizer, such as a global that its loss changes"
    )

    def kills(self, known: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return all ``known`` kills."""
        return list(known)

    def start(self, folder: Path, settings: Sequence[str]) -> RunResult:
        """Train once; logs and checkpoints are below ``folder``."""
        arguments = [
            f"--max-steps={self.steps}",
            "log.evaluate_batches=1",
            *self.words,
            f"--log-dir={folder / 'logs'}",
            f"--checkpoint-dir={folder / 'checkpoints'}",
            *settings,
        ]
        return launch(nproc=2, arguments=arguments)

    def steps_of(self, result: RunResult, *, least: int) -> int:
        """Return the number of steps, which was given."""
        del result, least
        return self.steps


class _Check:
    """One ``check``: its runs, one after the other, in one folder."""

    def __init__(
        self, runs: _TaskRuns | LoopRuns, *, steps: int, talk: _Talk, as_json: bool
    ) -> None:
        """``steps``: the steps of each run; 0: known once the first run has ended."""
        self._runs = runs
        self._kills: list[tuple[str, str]] = []
        self._steps = steps
        self._talk = talk
        self._as_json = as_json
        self._folder = Path()
        self._reference: Mapping[str, Any] = {}

    def perform(self, folder: Path) -> ExitCode:
        """Run and compare; show what holds."""
        self._folder = folder
        length = f"{self._steps} steps a run; " if self._steps else ""
        self._talk.say(f"check: {length}a table of results follows at the end")
        self._kills = self._runs.kills(KILLS)  # as a test may have changed them
        first = self._train("without_faults")
        if first.result.exit_code == ExitCode.BAD_USAGE:
            print(f"ddp_runner: error: {first.error}", file=sys.stderr)
            return ExitCode.BAD_USAGE
        self._reference = first.result.summary or {}
        rows = [self._row("without faults", first)]
        if first.result.exit_code == ExitCode.DONE:
            self._steps = self._runs.steps_of(first.result, least=STEPS_MIN)
            rows += self._proof(self._reference)
            rows += self._killed()
            rows.append(self._stopped())
        return self._show(rows)

    def _show(self, rows: Sequence[Checked]) -> ExitCode:
        holds = all(row.holds for row in rows)
        if self._as_json:
            record = {
                "holds": holds,
                "weights_sha256": self._reference.get("weights_sha256"),
                "exact_proof": self._reference.get("exact_proof"),
                "rows": [asdict(row) for row in rows],
            }
            print(json.dumps(record, indent=2))
        else:
            show_checked([(row.what, row.holds, row.seconds, row.says) for row in rows])
            failed = sum(not row.holds for row in rows)
            print(" all holds" if holds else f" {failed} of {len(rows)} do not hold")
            sys.stdout.flush()
        return ExitCode.DONE if holds else ExitCode.FAILED

    def _train(self, name: str, *more: str, runs: str = "", stops: bool = False) -> _Run:
        """A run as a child process; ``runs``: in the folder of that one. KeyboardInterrupt ends it."""
        folder = self._folder / (runs or name)
        settings = [
            *([f"checkpoint.save_every_steps={max(2, self._steps // 8)}"] if self._steps else []),
            "recovery.max_restarts=100",
            "checkpoint.after_save=none",
            "log.display=plain",
            "log.trackers=",
            "log.page=false",
            *more,
        ]
        began_s = time.monotonic()
        output = io.StringIO()
        # Neither is a descriptor, so that the child's output comes through a pipe.
        with redirect_stdout(output), redirect_stderr(output), _stopping(folder / "logs", stops):
            result = self._runs.start(folder, settings)
        seconds = time.monotonic() - began_s
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(output.getvalue(), encoding="utf-8")
        is_asked = stops and result.exit_code == ExitCode.PREEMPTED
        if result.exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED) and not is_asked:
            raise KeyboardInterrupt
        if result.exit_code != ExitCode.BAD_USAGE:  # of which the error says enough
            self._talk.say(f"  {seconds:5.1f} s  {name.replace('_', ' ')}")
        return _Run(result=result, seconds=seconds, output=output.getvalue())

    def _row(self, what: str, run: _Run, *, seconds: float | None = None) -> Checked:
        says = self._why_not(run)
        shown_s = run.seconds if seconds is None else seconds
        return Checked(what=what, holds=not says, seconds=shown_s, says=says)

    def _why_not(self, run: _Run) -> str:
        """Why a run does not hold; empty where it does."""
        summary = run.result.summary
        if run.result.exit_code != ExitCode.DONE or summary is None:
            return run.error
        has_other_weights = summary["weights_sha256"] != self._reference["weights_sha256"]
        if summary["exact"]:
            return self._runs.unexplained if has_other_weights else ""
        if summary is self._reference or self._reference["exact"]:
            return "exact: false, " + "; ".join(summary["inexact_reasons"])
        weights = "other weights, and " if has_other_weights else ""
        return f"{weights}exact: false, as without faults"

    def _proof(self, summary: Mapping[str, Any]) -> list[Checked]:
        """Return the rows that the run without faults has proved itself, if it does so."""
        proof = summary.get("exact_proof") or {}
        rows = []
        if proof.get("repeated"):
            rows.append(Checked(what="a step computed twice", holds=True, seconds=None))
        if proof.get("drilled"):
            steps = ", ".join(map(str, proof["drilled"]))
            says = f"a replacement computes step {steps} with the same bits"
            rows.append(Checked(what="fire drill", holds=True, seconds=None, says=says))
        return rows

    def _killed(self) -> list[Checked]:
        """Test all kills in one run; if that fails, test each kill in a separate run."""
        specs = [
            _at(spec, (number + 1) * self._steps // (len(self._kills) + 1))
            for number, (_, spec) in enumerate(self._kills)
        ]
        together = self._train("kills", *(f"--inject={spec}" for spec in specs))
        seconds = [_repaired_s(together, number) for number in range(len(specs))]
        is_known = not self._reference["exact"]  # and why: each kill alone would say no more
        if None not in seconds and (is_known or not self._why_not(together)):
            return [
                self._row(what, together, seconds=took_s)
                for (what, _), took_s in zip(self._kills, seconds, strict=True)
            ]
        return [
            self._killed_alone(what, spec)
            for (what, _), spec in zip(self._kills, specs, strict=True)
        ]

    def _killed_alone(self, what: str, spec: str) -> Checked:
        alone = self._train(what.replace(" ", "_"), f"--inject={spec}")
        row = self._row(what, alone, seconds=_repaired_s(alone, 0))
        if row.holds and _repaired_s(alone, 0) is None:
            return Checked(what=what, holds=False, seconds=None, says="it was not seen to happen")
        return row

    def _stopped(self) -> Checked:
        slow = f"--inject=slow:rank=0,phase=forward,step={self._steps // 2},seconds={_STOP_S}"
        stopped = self._train("stopped", slow, stops=True)
        if stopped.result.exit_code != ExitCode.PREEMPTED:
            return Checked(what=_STOPPED, holds=False, seconds=stopped.seconds, says=stopped.error)
        resumed = self._train("resumed", runs="stopped")
        return self._row(_STOPPED, resumed, seconds=stopped.seconds + resumed.seconds)


def _at(spec: str, step: int) -> str:
    return f"{spec},step={step}"


def _repaired_s(run: _Run, number: int) -> float | None:
    """Return the seconds from fault ``number`` of ``--inject`` until all ranks trained again; None if they never did."""
    summary = run.result.summary or {"injected": (), "faults": ()}
    struck_s = next((one["at_s"] for one in summary["injected"] if one["number"] == number), None)
    if struck_s is None:
        return None
    repaired_s = [one["recovered_s"] for one in summary["faults"] if one["recovered_s"] is not None]
    after_s = min((at_s for at_s in repaired_s if at_s > struck_s), default=None)
    return None if after_s is None else float(after_s - struck_s)


@contextmanager
def _stopping(log_dir: Path, stops: bool) -> Iterator[None]:
    """Send the run in ``log_dir`` SIGTERM once its injected fault has happened, if it ``stops``."""
    if not stops:
        yield
        return
    over = threading.Event()
    watching = threading.Thread(target=_stop_when_struck, args=(log_dir, over), name="stop")
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _stop_when_struck(log_dir: Path, over: threading.Event) -> None:
    """Thread: watch the journal, and stop the run as a scheduler does."""
    while not over.wait(_LOOK_S):
        try:
            has_struck = '"injected"' in (log_dir / "events.jsonl").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if has_struck:
            for child in psutil.Process().children():
                child.send_signal(signal.SIGTERM)
            return


class _CheckCommand(SmallCommand):
    """Passes every word after the file of ``--loop`` to that program."""

    def parse(self, words: Sequence[str]) -> Arguments:
        """Return ``words`` sorted into options and arguments. Raises BadInputError."""
        options, program = cut_at_program(words)
        found = super().parse(options)
        return replace(found, words=(*found.words, *([LOOP, *program] if program else [])))


DECLARATION = _CheckCommand(
    usage=f"""Usage:  {COMMAND} check --task FILE.py:NAME [OPTIONS] [SETTINGS]
        {COMMAND} check [OPTIONS] --loop FILE.py [ARGUMENTS]

Checks a task, or your own loop that calls ddp_runner.attach(), in about a
minute, in a temporary folder. It makes short runs: without faults, with a rank
killed in each phase of a step and of a save, with all ranks killed, and
stopped and resumed. Each must end with bit-identical weights and report itself
exact. A table of results follows. Exit codes: 0 if all runs pass, 1 if not
(with the reason; the folder is kept), 2 for wrong input. Put it into your CI.""",
    options=(
        Option("--task", key="run.task", metavar="FILE.py:NAME", says="task to check"),
        Option(
            LOOP,
            key="run.task",
            metavar="FILE.py [ARGUMENTS]",
            says="program with its own loop; it runs in this folder, each time with these "
            "ARGUMENTS",
        ),
        Option(
            "--nproc-per-node",
            short="-n",
            key="run.nproc_per_node",
            metavar="N",
            says="number of ranks [2]",
        ),
        Option(
            "--batch-size",
            short="-b",
            key="data.batch_size",
            metavar="N",
            says="samples per rank and step [as in train]",
        ),
        Option(
            "--max-steps",
            key="run.max_steps",
            metavar="N",
            says=f"steps of each run, {STEPS_MIN} or more [{STEPS}]",
        ),
        Option(KEEP, says="keep the folder with logs and checkpoints of the runs"),
        replace(JSON, says="print the table as JSON, for programs"),
    ),
    closing="""Every other option and setting of train (with --loop: of run) works as well,
except those of folders, --resume and --inject. The runs use the device that
train would use.""",
    takes_rest=True,
    perform=_run,
)
