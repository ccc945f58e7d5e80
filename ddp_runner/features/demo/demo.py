"""``demo``: trains without faults and under them, and compares the weights.

The faults are those of ``--inject``, so they come from the operating system or from inside a real
rank; everything reported afterwards is read from summary.json of the run.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp_runner.cli.command import Arguments, SmallCommand
from ddp_runner.cli.from_code.launch import RunResult, launch
from ddp_runner.cli.scratch import in_temporary_folder, say_now
from ddp_runner.core.injection import InjectKind
from ddp_runner.core.settings.declaration import Option
from ddp_runner.features.demo.tables import Repaired, read_repairs, show_changes, show_repairs
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.system.run_files import from_json, read_small
from ddp_runner.observe.format import clock, count
from ddp_runner.observe.history.json_lines import last_lines
from ddp_runner.observe.summary import RunSummary, read_summary
from ddp_runner.start import COMMAND

NPROC = "--nproc-per-node"
KEEP = "--keep"
RANKS_MIN, RANKS_MAX = 2, 8
_PROGRESS_EVERY_S = 0.5
_PROGRESS_COLUMNS = 58  # fits the narrowest terminal, and covers the line before
_LOG_LINES = 20


def _run(arguments: Arguments) -> int:
    """Show it; 0 if the weights are identical. Raises BadInputError."""
    text = arguments.values.get(NPROC, str(RANKS_MIN))
    if not (text.isdecimal() and RANKS_MIN <= int(text) <= RANKS_MAX):
        raise BadInputError(
            NPROC,
            text,
            f"must be {RANKS_MIN} to {RANKS_MAX}: what is left of a world repairs it",
        )
    return perform(script_for(int(text)), keep=KEEP in arguments.switches)


def perform(script: Script, *, keep: bool) -> int:
    """Train in a temporary folder and compare; the exit code."""
    return in_temporary_folder("demo", partial(_train_and_compare, script), keep=keep)


def _train_and_compare(script: Script, folder: Path) -> ExitCode:
    apart = f"one every {script.fault_interval_steps} steps"
    acts = (
        ("without faults", (), "without faults"),
        ("under faults", script.harmless, f"faults that leave no trace in the weights, {apart}"),
        ("with changes", script.changing, f"faults that change what is computed, {apart}"),
    )
    played = [act for act in acts if act[1] or act is acts[0]]
    say_now(f"demo: {script.world_size} ranks train the same small model, {script.steps} steps")
    runs: list[tuple[str, RunSummary]] = []
    complete = True
    for number, (name, blows, title) in enumerate(played, start=1):
        count = f"{sum(map(len, blows))} " if blows else ""
        say_now(f"\n{number} of {len(played)}: {count}{title}\n")
        result = _train(script, folder / name.replace(" ", "_"), blows)
        if result.summary is None:
            return _unfinished(result)
        summary = read_summary(result.log_dir / "summary.json")
        # One that was trained to its end failed since a fault never came, which the table shows.
        if result.exit_code != ExitCode.DONE and summary.steps < script.steps:
            return _unfinished(result)
        runs.append((name, summary))
        if blows:
            repairs = read_repairs(summary)
            (show_repairs if blows is script.harmless else show_changes)(repairs)
            complete &= _are_all_there(repairs, blows)
        for reason in summary.inexact_reasons:
            say_now(f" exact: false, {reason}")
    say_now("")
    for name, summary in runs:
        print(
            f" {name:<14} {summary.wall_s:5.1f} s   weights {str(summary.weights_sha256)[:16]}"
            f"   loss {summary.final_loss:.4f}"
        )
    alike = [summary for (_, summary), act in zip(runs, played, strict=True) if act is not acts[2]]
    identical = len({summary.weights_sha256 for summary in alike}) == 1
    say_now(f" identical weights: {'yes' if identical else 'no'}")
    return ExitCode.DONE if identical and complete else ExitCode.FAILED


def _are_all_there(repairs: Sequence[Repaired], blows: tuple[Blow, ...]) -> bool:
    """Return whether each fault of the act has its own row."""
    asked = Counter(InjectKind(spec.partition(":")[0]) for blow in blows for spec in blow)
    found = Counter(repair.injected for repair in repairs)
    seen = sum(min(count, found[kind]) for kind, count in asked.items())
    if seen < asked.total():
        say_now(f" only {seen} of {asked.total()} faults are in the summary")
    return seen == asked.total()


def _train(script: Script, folder: Path, blows: tuple[Blow, ...]) -> RunResult:
    """Train once in a child process, with one line of progress on a terminal; the tables show the rest."""
    arguments = [
        "log.display=none",
        "--cpu",
        f"--log-dir={folder / 'logs'}",
        f"--checkpoint-dir={folder / 'checkpoints'}",
        f"--max-steps={script.steps}",
        "--resume=none",
        *SETTINGS,
        *(CHANGING_SETTINGS if blows and blows is script.changing else ()),
        *(f"--inject={spec}" for spec in script.injections(blows)),
    ]
    # Whatever a file at home says of machines.
    with _progress(folder / "logs" / "status.json"):
        return launch("synthetic", nproc=script.world_size, arguments=["--nnodes=1", *arguments])


@contextmanager
def _progress(status: Path) -> Iterator[None]:
    """Keep a line about the run up to date while it lasts, if there is a terminal."""
    if not sys.stdout.isatty():
        yield
        return
    is_over = threading.Event()

    def show() -> None:
        while not is_over.wait(_PROGRESS_EVERY_S):
            sys.stdout.write(f"\r{_progress_line(status):<{_PROGRESS_COLUMNS}}")
            sys.stdout.flush()

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        say_now(f"\r{_progress_line(status):<{_PROGRESS_COLUMNS}}")


def _progress_line(status: Path) -> str:
    """Return ``step 120/340  3 faults  0:42``, or what the run is starting."""
    try:
        run = from_json(read_small(status))
    except (OSError, ValueError):  # not written yet
        return " starting"
    where = run.get("doing") or f"step {count(run['step'])}/{count(run['max_steps'])}"
    faults = run["faults_total"]
    return f" {where}  {faults} fault{'' if faults == 1 else 's'}  {clock(run['elapsed_s'])}"


def _unfinished(result: RunResult) -> ExitCode:
    """Return the exit code for a run that did not train to its end; the end of its log says why it failed."""
    if result.exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED):
        return ExitCode.INTERRUPTED
    for line in last_lines(result.log_dir / "supervisor.log")[-_LOG_LINES:]:
        say_now(line)
    say_now(f"demo: that run ended with exit code {result.exit_code}")
    return ExitCode.FAILED


# What the demo does: the faults of its acts, where they happen, and the settings of its runs.

Blow = tuple[str, ...]  # specs of ``--inject`` that come at the same step; without it, or a rank

_SAVE_EVERY_STEPS = 20
SETTINGS = (
    *("model.vocab_size=64", "model.dataset_size=20000", "model.seq_len=32"),
    *("model.hidden_size=64", "model.num_layers=2", "model.num_heads=2", "model.dropout=0.1"),
    *("data.batch_size=16", "data.num_workers=1", "optim.learning_rate=3e-3"),
    *("optim.warmup_steps=20", f"checkpoint.save_every_steps={_SAVE_EVERY_STEPS}"),
    *("log.evaluate_every_steps=60", "log.evaluate_batches=8", "log.log_interval=20"),
    *("recovery.max_restarts=100", "recovery.hang_min_s=2"),
)
# Act 3 has what a run needs so that these can be noticed, or repaired.
CHANGING_SETTINGS = (
    *("ddp.find_unused_parameters=false", "data.on_bad_sample=substitute"),
    *("recovery.explosion_window=50", "recovery.on_wrong_gradient=continue"),
)

_HARMLESS: tuple[Blow, ...] = (
    ("kill:phase=reduce",),
    ("kill:phase=commit",),
    ("disk_full:rank=0,phase=checkpoint,seconds=0.3",),
    ("raise:phase=forward",),
    ("exit:phase=backward",),
    ("loader_kill:phase=data",),
    ("loader_stop:phase=data",),
    ("disk_error:rank=0,phase=checkpoint",),
    ("oom:phase=evaluate",),
    ("stop:phase=forward",),
    ("hang:phase=backward",),
    ("spin:phase=data",),
    ("slow_disk:rank=0,phase=checkpoint",),
    ("gil:phase=optimizer",),
    ("slow:phase=forward",),
)
_CHANGING: tuple[Blow, ...] = (
    ("oom:phase=backward",),
    ("unused",),
    ("nan",),
    ("bad_sample:phase=data",),
    ("spike",),
    ("wrong_gradient",),
    ("hidden_state",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The faults of the second and the third act, ``fault_interval_steps`` apart, and their place."""

    world_size: int
    steps: int
    harmless: tuple[Blow, ...]
    changing: tuple[Blow, ...]
    fault_interval_steps: int = _SAVE_EVERY_STEPS

    def injections(self, blows: tuple[Blow, ...]) -> list[str]:
        """The faults as specs of ``--inject``, on one rank after the other, midway between saves."""
        return [
            _complete(spec, rank=number % self.world_size, step=self._step_of(number))
            for number, blow in enumerate(blows, start=1)
            for spec in blow
        ]

    def _step_of(self, number: int) -> int:
        return number * self.fault_interval_steps - self.fault_interval_steps // 2


def script_for(world_size: int) -> Script:
    """Return every kind of fault for this number of ranks, each in the act where it belongs.

    Of two replicas none is the majority if one changes: both go back to a checkpoint, and the change leaves no
    trace. With more ranks the others heal it, which have summed its gradients by then. Damage to
    a checkpoint shows when one is loaded.
    """
    lost = "diverge" if world_size == 2 else "kill:rank=all,phase=backward"
    harmless = (*_HARMLESS, ("corrupt_checkpoint:rank=0", lost))
    changing = _CHANGING if world_size == 2 else (*_CHANGING, ("diverge",))
    return Script(
        world_size=world_size,
        steps=(len(harmless) + 1) * _SAVE_EVERY_STEPS,
        harmless=harmless,
        changing=changing,
    )


def _complete(spec: str, *, rank: int, step: int) -> str:
    kind, _, rest = spec.partition(":")
    values = rest.split(",") if rest else []
    if not any(value.startswith("rank=") for value in values):
        values.append(f"rank={rank}")
    return f"{kind}:{','.join([*values, f'step={step}'])}"


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} demo [-n N] [--keep]

Trains a small model three times on the CPU, in a temporary folder: without
faults; with each fault that must not change the result (ranks, loader workers,
memory, disk, a flipped bit); and with the faults that change it. A table shows
the faults of each run. Exit codes: 0 if the first two runs have bit-identical
weights and every fault was noticed, otherwise 1. The demo takes about a minute
on two cores. Ctrl-C ends it and removes the folder.""",
    options=(
        Option(NPROC, short="-n", metavar="N", says=f"ranks, {RANKS_MIN} to {RANKS_MAX} [2]"),
        Option(KEEP, says="keep the folder with logs and checkpoints of the runs"),
    ),
    perform=_run,
)
