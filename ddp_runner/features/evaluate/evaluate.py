"""``evaluate``: loss and metrics of a checkpoint. Finds the checkpoint and its run's settings; imports torch late."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ddp_runner.checkpoint.catalog import Catalog, Entry
from ddp_runner.cli.checkpoint_show import chosen
from ddp_runner.cli.command import CHECKPOINT_DIR, JSON, NAME, Arguments, SmallCommand
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.runs import checkpoint_dir_of
from ddp_runner.config.compose import resolve
from ddp_runner.config.identity import GLOBAL_BATCH
from ddp_runner.core.run_stages import StageOfFile
from ddp_runner.core.settings.declaration import Option
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import HIDDEN
from ddp_runner.start import COMMAND

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp_runner.core.settings import Settings

NO_EMA = Option("--no-ema", says="use the weights, even if the run keeps their moving average")
ON = Option("--on", metavar="SET", says="use only this data set: test, validation or its name")
OPTIONS = (ON, CHECKPOINT_DIR, NAME, NO_EMA)
# What a run computes with, and one process that looks at its model does not.
_FOR_ONE: Mapping[str, Mapping[str, object]] = {
    "run": {
        "nproc_per_node": "auto",
        "compile": False,
        "inject": [],
        "stage": "",
        "resume": "none",
    },
    "data": {"preload": False, "shares": [], "accumulation_total": 0},
}
_MODULE = "ddp_runner.features.evaluate.over_data"  # by name: it needs torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Holds what a run's steps depended on and this process has otherwise. ``batch``: of a step, 0 where nobody knows."""

    ranks: int = 1
    batch: int = 0
    first_step: int = 0  # of the stage

    @classmethod
    def of(cls, entry: Entry) -> Trained:
        """Read it from a manifest."""
        manifest = entry.manifest
        if manifest is None:
            return cls()
        stage = StageOfFile.from_about(manifest.about)
        ranks, batch = manifest.recipe.get("ranks"), manifest.meaning.get(GLOBAL_BATCH)
        return cls(
            ranks=ranks if isinstance(ranks, int) else 1,
            batch=batch if isinstance(batch, int) else 0,
            first_step=0 if stage is None else stage.first_step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The checkpoint to use and the settings of its run. ``data``: the name of the one data set, or empty for all."""

    path: Path
    step: int
    settings: Settings
    is_average: bool
    trained: Trained
    data: str = ""

    @classmethod
    def by(cls, arguments: Arguments, *, whole: bool = False) -> Asked:
        """Read the command line and the checkpoint's manifest. Raises BadInputError.

        ``whole``: all samples of a data set are wanted, also where the run evaluates a part.
        """
        words = list(arguments.words)
        which = words.pop(0) if words and _is_checkpoint(words[0]) else "last"
        catalog = Catalog(checkpoint_dir_of(arguments) if _needs_folder(which) else Path())
        entry = chosen(catalog, which)
        _refuse_of_loop(entry)
        if (problem := Catalog(entry.path.parent).verify(entry)) is not None:
            raise BadInputError(str(entry.path), "", f"cannot be trusted: {problem}")
        settings = _settings(entry, words, whole=whole)
        is_average = settings.optim.ema_decay is not None and (
            NO_EMA.long not in arguments.switches
        )
        written = f"{entry.path}:ema" if is_average else str(entry.path)
        return cls(
            path=entry.path,
            step=entry.step,
            trained=Trained.of(entry),
            settings=replace(settings, run=replace(settings.run, init_from=written)),
            is_average=is_average,
            data=arguments.values.get(ON.long, ""),
        )


def _is_checkpoint(word: str) -> bool:
    """Return True for what is no option and no setting: a path may have a ``=`` as well."""
    name, equals, _ = word.partition("=")
    return not word.startswith("-") and (not equals or "/" in name or Path(word).is_file())


def _refuse_of_loop(entry: Entry) -> None:
    """Raise BadInputError for a checkpoint of a loop of the user's own."""
    meaning = {} if entry.manifest is None else entry.manifest.meaning
    if meaning and "run.task" not in meaning:
        what = "is of a program's own loop, which has no task: only that program can use it"
        raise BadInputError(str(entry.path), "", what)


def _needs_folder(which: str) -> bool:
    return which in ("auto", "last", "best") or which.isdecimal()


def _settings(entry: Entry, words: list[str], *, whole: bool) -> Settings:
    """Return the settings of the checkpoint's run, changed as the command line says."""
    parsed = parse_train(words)
    if parsed.instead:
        raise BadInputError(parsed.instead, "", "is an option of train: leave it out")
    record = None if entry.manifest is None else entry.manifest.about.get("settings")
    if not isinstance(record, dict):
        what = "does not record the settings of its run: choose a checkpoint that a run saved"
        raise BadInputError(str(entry.path), "", what)
    base: dict[str, Any] = {name: value for name, value in record.items() if name != "stages"}
    for section, values in _FOR_ONE.items():
        base[section] = {**base.get(section, {}), **values}
    if whole:
        base["log"] = {**base.get("log", {}), "evaluate_batches": 0}
        base["run"]["limit_batches"] = 0
    with tempfile.TemporaryDirectory(prefix="ddp-evaluate-") as folder:
        file = Path(folder, "config.yaml")
        file.write_text(yaml.safe_dump(base), encoding="utf-8")
        settings = resolve(
            files=(file, *parsed.files), environment=os.environ, command_line=parsed.assignments
        ).settings
    if whole and settings.data.on_bad_sample == "substitute":
        if any("on_bad_sample" in word for word in words):
            what = "gives a sample the output of another one: predict cannot use it"
            raise BadInputError("data.on_bad_sample", "substitute", what)
        settings = replace(settings, data=replace(settings.data, on_bad_sample="stop"))
    for name, value in settings.task.items():
        if HIDDEN in str(value):
            what = "is a secret, and checkpoints hold no secrets: give it again"
            raise BadInputError(f"task.{name}", "", what)
    return settings


def _run(arguments: Arguments) -> int:
    """Evaluate, and print the figures. Raises BadInputError."""
    asked = Asked.by(arguments)
    found = import_module(_MODULE).evaluate(asked, as_json=JSON.long in arguments.switches)
    return int(found)


DECLARATION = SmallCommand(
    usage=(
        f"Usage:  {COMMAND} evaluate [CHECKPOINT] [OPTIONS] [SETTING=VALUE ...]\n"
        "\n"
        "Computes the loss and the metrics of a checkpoint in one process, on the\n"
        "task's validation data and on its test data, Datasets(test=...). CHECKPOINT\n"
        "is last, best, a step or a path [last]. The checkpoint holds the task and the\n"
        "settings; the command line overrides settings: evaluate_batches=10"
    ),
    perform=_run,
    options=(*OPTIONS, JSON),
    takes_rest=True,
)
