"""Suggests what to type if a folder holds a run with other settings. Looks for free names on the disk."""

from __future__ import annotations

import json
import re
import shlex
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.config.identity import GLOBAL_BATCH, is_described, is_sealed
from ddp_runner.core.settings.whole_run import CHECKPOINTS, LOGS
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import is_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp_runner.core.settings import DataSettings, Settings

_OPTION_OF = {
    "name": "--name",
    "resume": "--resume",
    "checkpoint_dir": "-c",
    "log_dir": "-l",
    "batch_size": "-b",
    "run.task": "--task",
    "run.seed": "--seed",
    "data.path": "--data",
}
_NUMBERED = re.compile(r"-\d+$")


def ways_on(
    settings: Settings, *, old: Mapping[str, object], new: Mapping[str, object], world_size: int
) -> str:
    """The three ways on from a checkpoint of other settings, each with the exact words to type.

    ``old`` and ``new`` are the resume keys of the checkpoint and of this launch (``identity.resume_key``).
    """
    words, others = words_of_old(old, new, world_size=world_size, data=settings.data)
    return (
        f"choose one: {own_folder(settings)} (a separate run); {words_of(resume='none')} (start fresh; "
        f"old files go to a backup folder); or the old settings: {', '.join([*words, *others])}"
    )


def ways_on_with_data(settings: Settings) -> str:
    """The ways on from a checkpoint of a run whose data was another one, each with the words to type."""
    return (
        f"choose one: the old data; {words_of(**{'data.compare_samples': 'tell'})} (continues, and exact"
        f" is false); {own_folder(settings)} (a separate run); {words_of(resume='none')} (start fresh;"
        " old files go to a backup folder)"
    )


def own_folder(settings: Settings) -> str:
    """The words that give this launch folders where no run is."""
    run = settings.run
    if run.has_folders_of_its_name:
        stem = _NUMBERED.sub("", run.name)
        names = (f"{stem}-{number}" for number in count(2))
        taken = (LOGS, CHECKPOINTS)
        return words_of(name=next(n for n in names if not any(Path(r, n).exists() for r in taken)))
    folders = (_NUMBERED.sub("", run.checkpoint_dir), _NUMBERED.sub("", run.log_dir))
    pairs = ((f"{folders[0]}-{number}", f"{folders[1]}-{number}") for number in count(2))
    free = next(pair for pair in pairs if not any(Path(folder).exists() for folder in pair))
    return words_of(checkpoint_dir=free[0], log_dir=free[1])


def words_of(**values: object) -> str:
    """Return the words that give these settings: of our command, or in Python where no command has started this process."""
    if not start.is_command():
        return f"config={json.dumps(values)}"
    texts = {key: _typed(value) for key, value in values.items()}
    options = ((_OPTION_OF.get(key), key, text) for key, text in texts.items())
    return " ".join(
        f"{option} {text}" if option else f"{key}={text}" for option, key, text in options
    )


def resume_as_given(resume: str) -> tuple[str, str]:
    """Return the name and the value of ``run.resume`` for an error, as the user has written or would write them.

    In Python the default value is left out, because nobody writes it.
    """
    if start.is_command():
        return "--resume", resume
    return "resume", "" if resume == "auto" else resume


def no_checkpoint(resume: str, folder: Path) -> BadInputError:
    """Return the error for a ``resume`` that needs a checkpoint where ``folder`` has none."""
    fresh = words_of(resume="auto")
    expected = f"there is no checkpoint in {folder}; {fresh} would start at step 0"
    return BadInputError(*resume_as_given(resume), expected)


def words_of_old(
    old: Mapping[str, object],
    new: Mapping[str, object],
    *,
    world_size: int,
    data: DataSettings | None = None,
) -> tuple[list[str], list[str]]:
    """Return the words to type for the old values, and the changes that no words can undo."""
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    changed += [key for key in sorted({*old} ^ {*new}) if key not in changed]
    words, others = [], []
    for key in changed:
        if key == GLOBAL_BATCH and isinstance(old.get(key), int):
            words.append(_batch_words(int(str(old[key])), world_size, data))
        elif key == "data.path" and not old.get(key):
            others.append("no --data")
        elif key not in old:
            others.append(f"no {key}")
        elif is_sealed(old[key]) or is_secret(key, old[key]):
            others.append(f"the old {key}")
        elif key == "ranks":  # of a loop of one's own: nothing shares its batches out again
            words.append(_ranks(old[key]))
        elif "." not in key or is_described(key):  # a fact about the data, which is not a setting
            others.append(f"the {key.removesuffix(' fingerprint')} as it was")
        else:
            words.append(words_of(**{key: old[key]}))
    return words, others


def _batch_words(total: int, world_size: int, data: DataSettings | None) -> str:
    if data is not None:
        others = {"accumulation": 1} if data.accumulation > 1 else {}
        others |= {"accumulation_total": 0} if data.accumulation_total else {}
        if data.global_batch_size or others:
            return words_of(global_batch_size=total, **others)
    if total % world_size == 0:
        return words_of(batch_size=total // world_size)
    # Any number of ranks shares the samples of a step out; a rank without one is refused.
    if total > world_size:
        return words_of(global_batch_size=total)
    return f"{_ranks(total)} {words_of(batch_size=1)}"


def _ranks(count: object) -> str:
    return f"-n {count}" if start.is_command() else f"{count} rank{'s' * (count != 1)}"


def _typed(value: object) -> str:
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))
