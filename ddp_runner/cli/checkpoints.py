"""``checkpoints``: which there are, whether each can be trusted, what one holds; files for others; fewer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.checkpoint.catalog import NO_FILE, Catalog, Entry
from ddp_runner.checkpoint.manifest import manifest_name, stage_name
from ddp_runner.cli.checkpoint_show import chosen, lines_of, record_of, short_record
from ddp_runner.cli.command import CHECKPOINT_DIR, JSON, NAME, Arguments, SmallCommand, show
from ddp_runner.cli.runs import checkpoint_dir_of
from ddp_runner.config.run_names import at_home
from ddp_runner.core.settings.declaration import Option
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.system.disk import Disk, RealDisk
from ddp_runner.observe.format import byte_size
from ddp_runner.start import COMMAND
from ddp_runner.system.environment import probe_environment

if TYPE_CHECKING:
    from collections.abc import Mapping


_ACTIONS = ("list", "verify", "show", "export", "prune")
_EMA, _DRY_RUN, _ALL = "--ema", "--dry-run", "--all"
_STAGE_WIDTH = 10
_OPTIONS_OF = {
    "export": {"--to", "--format", "--layout", "--dtype", "--init-from", _EMA},
    "prune": {"--keep", _ALL, _DRY_RUN},
}


def _run(arguments: Arguments) -> int:
    """Do it; 1 if a checkpoint that was to be verified is bad. Raises BadInputError."""
    action, *which = arguments.words or ("list",)
    if action not in _ACTIONS:
        raise BadInputError(action, "", f"unknown action; use {', '.join(_ACTIONS)}")
    if which and action not in ("show", "export"):
        raise BadInputError(which[0], "", f"unexpected word: {action} acts on all checkpoints")
    given = {*arguments.values, *arguments.switches}
    for other, options in _OPTIONS_OF.items():
        if other != action and (odd := sorted(options & given)):
            raise BadInputError(odd[0], "", f"is an option of checkpoints {other}")
    catalog = Catalog(checkpoint_dir_of(arguments))
    if action == "prune":
        return _prune(catalog, arguments)
    if action == "show":
        return _show(catalog, (which or ["last"])[0], as_json=JSON.long in arguments.switches)
    if action == "export":
        return _export(catalog, (which or ["last"])[0], arguments)
    return _list(catalog, action, as_json=JSON.long in arguments.switches)


def _show(catalog: Catalog, which: str, *, as_json: bool) -> int:
    record = record_of(catalog, chosen(catalog, which))
    if as_json:
        print(json.dumps(record))
    else:
        for line in lines_of(record):
            show(line)
    return ExitCode.DONE if record["problem"] is None else ExitCode.FAILED


def _export(catalog: Catalog, which: str, arguments: Arguments) -> int:
    to = arguments.values.get("--to", "")
    if not to:
        raise BadInputError("--to", "", "is required: the folder for the files")
    entry = chosen(catalog, which)
    return export(
        catalog,
        entry,
        to=at_home(to),
        values=arguments.values,
        average=_EMA in arguments.switches,
    )


def _prune(catalog: Catalog, arguments: Arguments) -> int:
    written = arguments.values.get("--keep", "")
    if not written.isdecimal() or int(written) < 1:
        must = "must be" if written else "is required:"
        raise BadInputError(
            "--keep", written, f"{must} the number of checkpoints to keep, 1 or more"
        )
    keep, is_dry = int(written), _DRY_RUN in arguments.switches
    entries, best = catalog.entries(), catalog.best()
    pruning = plan_pruning(
        entries,
        keep=keep,
        verify=catalog.verify,
        best_step=None if best is None else best.step,
        keep_every=_keep_every(entries),
        of_stages=catalog.of_past_stages(),
        takes_all=_ALL in arguments.switches,
    )
    for entry, why in pruning.spared:
        show(f"kept {entry.path} ({why})")
    if not is_dry:
        try:
            perform_pruning(catalog, pruning)
        except OSError as error:
            show(f"{error.filename or catalog.directory}: {error.strerror or error}")
            return ExitCode.FAILED
    for entry in pruning.removed:
        size = "" if entry.manifest is None else f" ({byte_size(entry.manifest.size_bytes)})"
        show(f"{'would remove' if is_dry else 'removed'} {entry.path}{size}")
    if not pruning.removed:
        few = f": only {pruning.sound} of them verify" if pruning.sound < keep else ""
        all_of = f"nothing to remove of {len(entries)} checkpoints in {catalog.directory}{few}"
        show(all_of if entries else f"{catalog.directory} holds no checkpoints")
    return ExitCode.DONE


def _keep_every(entries: Sequence[Entry]) -> int:
    """Return checkpoint.keep_every of the newest entry that records it; 0 if none does."""
    for entry in entries:
        settings = {} if entry.manifest is None else entry.manifest.about.get("settings")
        section = settings.get("checkpoint") if isinstance(settings, dict) else None
        if isinstance(section, dict) and isinstance(section.get("keep_every"), int):
            return int(section["keep_every"])
    return 0


def _list(catalog: Catalog, action: str, *, as_json: bool) -> int:
    entries = catalog.entries()
    if not entries and not as_json:
        show(f"{catalog.directory} holds no checkpoint")
    has_bad = False
    best = catalog.best()
    width = max((len(_monitored(entry)) for entry in entries), default=0)
    for entry in entries:
        reason = catalog.verify(entry) if action == "verify" else entry.problem
        has_bad = has_bad or (action == "verify" and reason is not None)
        is_best = best is not None and best.step == entry.step
        record = short_record(entry, problem=reason, is_best=is_best)
        if as_json:
            print(json.dumps(record))
        else:
            is_verified = action == "verify"
            show(_line(entry, reason=reason, is_best=is_best, verified=is_verified, width=width))
    return ExitCode.FAILED if has_bad else ExitCode.DONE


def _monitored(entry: Entry) -> str:
    """Return the monitored figure with its name; empty where the file has none."""
    if entry.manifest is None or entry.manifest.monitored is None:
        return ""
    name = entry.manifest.monitor or "loss"  # of files that do not say
    return f"{name} {entry.manifest.monitored:.4f}"


def _line(entry: Entry, *, reason: str | None, is_best: bool, verified: bool, width: int) -> str:
    """``width``: of the column of the monitored figure."""
    manifest = entry.manifest
    cells = [f"step {entry.step:>8}"]
    if manifest is not None:
        cells += [
            f"{manifest.epoch:>3} epoch{' ' if manifest.epoch == 1 else 's'}",
            *([f"{stage:<{_STAGE_WIDTH}}"] if (stage := stage_name(manifest)) else []),
            f"{byte_size(manifest.size_bytes):>8}",
            f"{_monitored(entry):<{width}}",
            manifest.created_utc[:19],
        ]
    if reason is None:
        cells.append("ok" if verified else "")
    elif verified or manifest is not None or reason == NO_FILE:
        cells.append(f"BAD: {reason}")
    else:
        cells.append(f"{reason}; `checkpoints verify` reads its archive")
    cells.append("best" if is_best else "")
    return "  ".join(cells).rstrip()


# Which checkpoints a person may delete, and their deletion. Never imports torch; never decides
# when.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """``removed``: to be deleted, newest first. ``sound``: how many newest ones verified and stay.

    ``spared``: older ones that stay, with the reason.
    """

    removed: tuple[Entry, ...]
    sound: int
    spared: tuple[tuple[Entry, str], ...] = ()


# INVARIANT pruned-behind-sound: nothing is deleted that is not older than as many checkpoints as are to
# be kept, each of which was just read whole. Broken if: a damaged or an unread one counts as kept.
# Guarded by: test_pruning_counts_only_what_was_read_whole.
def plan_pruning(
    entries: Sequence[Entry],
    *,
    keep: int,
    verify: Callable[[Entry], str | None],
    best_step: int | None,
    keep_every: int = 0,
    of_stages: Collection[int] = (),
    takes_all: bool = False,
) -> Pruning:
    """Return which of ``entries``, newest first, to delete, so that the newest ``keep`` sound ones stay.

    The best one, those of a step that ``keep_every`` divides and those of completed stages (``of_stages``) stay too,
    unless ``takes_all`` is set.
    """
    sound, removed, spared = 0, [], []
    for entry in entries:
        if sound < keep:
            sound += entry.manifest is not None and verify(entry) is None
        elif not takes_all and entry.step == best_step:
            spared.append((entry, "the best"))
        elif not takes_all and entry.step in of_stages:
            spared.append((entry, "of a stage that is over"))
        elif not takes_all and keep_every and entry.step % keep_every == 0:
            spared.append((entry, f"for good: keep_every={keep_every}"))
        else:
            removed.append(entry)
    return Pruning(removed=tuple(removed), sound=sound, spared=tuple(spared))


def perform_pruning(catalog: Catalog, pruning: Pruning, *, disk: Disk | None = None) -> None:
    """Delete them, the oldest first, each with its manifest before it. Raises OSError."""
    disk = RealDisk() if disk is None else disk
    for entry in reversed(pruning.removed):
        for path in (catalog.directory / manifest_name(entry.step), entry.path):
            with contextlib.suppress(FileNotFoundError):  # a run's own retention works beside us
                disk.remove(path)
    if pruning.removed:
        disk.sync_directory(catalog.directory)


# ``checkpoints export``: a checkpoint's weights as files for other programs, made by a child
# with torch.

FORMATS = ("safetensors", "pt")
LAYOUTS = ("weights", "state_dict")
DTYPES = ("fp32", "bf16", "fp16")
_MODULE = "ddp_runner.rank.export"  # by name: it needs torch, and the command line must not


def export(
    catalog: Catalog, entry: Entry, *, to: Path, values: Mapping[str, str], average: bool
) -> int:
    """Write the weights into ``to``, an empty or new folder; the exit code. Raises BadInputError."""
    layout, dtype = values.get("--layout", "weights"), values.get("--dtype", "")
    is_dict = layout == "state_dict"
    form = values.get("--format", "pt" if is_dict else "safetensors")
    if layout not in LAYOUTS:
        raise BadInputError("--layout", layout, f"must be {' or '.join(LAYOUTS)}")
    if form not in FORMATS:
        raise BadInputError("--format", form, f"must be {' or '.join(FORMATS)}")
    if is_dict and form != "pt":
        raise BadInputError("--format", form, "cannot hold a dict: --layout state_dict needs pt")
    if is_dict and average:
        expected = "leave it out: --layout state_dict writes both the weights and the average"
        raise BadInputError(_EMA, "", expected)
    if dtype and dtype not in DTYPES:
        raise BadInputError("--dtype", dtype, f"must be {', '.join(DTYPES)}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise BadInputError("--to", to, "must be a new or an empty folder")
    if (problem := catalog.verify(entry)) is not None:
        raise BadInputError(str(entry.path), "", f"cannot be trusted: {problem}")
    settings = None if entry.manifest is None else entry.manifest.about.get("settings")
    spec: dict[str, object] = {
        "path": str(entry.path),
        "to": str(to),
        "format": form,
        "dtype": dtype,
        "average": average,
        "init_from": values.get("--init-from", ""),
        "settings": settings,
        "counts": _counts(entry) if is_dict else None,
    }
    return _export_in_child(entry, spec)


def _counts(entry: Entry) -> dict[str, object]:
    """Return the training progress of an entry, under the names that readers of other trainers look for."""
    found: dict[str, object] = {"step": entry.step, "global_step": entry.step}
    if (manifest := entry.manifest) is not None:
        found |= {"epoch": manifest.epoch, "samples": manifest.samples}
        known = {name: manifest.about.get(name) for name in ("tokens", "loss")}
        found |= {name: one for name, one in known.items() if isinstance(one, (int, float))}
    return found


def _export_in_child(entry: Entry, spec: Mapping[str, object]) -> int:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as pipe:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, start.__file__, _MODULE, str(writer), str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=(writer,),
                env=probe_environment(os.environ),
            )
        finally:
            os.close(writer)
        process.communicate(json.dumps(spec).encode())
        answer = pipe.read()
    try:
        said = json.loads(answer)
    except ValueError:
        show(f"the export ended with {process.returncode}")
        return ExitCode.FAILED
    if said.get("refused"):
        raise BadInputError(str(entry.path), "", said["refused"])
    for line in said["lines"]:
        show(line)
    return ExitCode.DONE


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} checkpoints ACTION [WHICH] [--name NAME | -c DIR]
                                                [--json]

  list                      every checkpoint, newest first; reads no content
  verify                    read each one whole and compare it with its
                            manifest; exit 1 if one is bad
  show [WHICH]              what it holds: step, losses, best, the settings
                            that differ from the defaults; verified
  export [WHICH] --to DIR   its weights for other programs, in a new folder, by
                            the model's own save_pretrained where it has one
  prune --keep N            delete all but the newest N that verify, the best
                            one, and those that are kept for good

WHICH is last (as without it), best, a step or a path.""",
    options=(
        Option("--to", metavar="DIR", says=""),
        Option("--keep", metavar="N", says=""),
        Option(
            "--format",
            metavar="FORMAT",
            says="format of an export: safetensors or pt [safetensors]",
        ),
        Option(
            "--layout",
            metavar="LAYOUT",
            says="layout of an export: weights, or state_dict, one file with a dict of "
            "state_dict, ema and counts [weights]",
        ),
        Option(
            "--dtype", metavar="TYPE", says="data type of an export: fp32, bf16 or fp16 [unchanged]"
        ),
        Option(_EMA, says="export the average (EMA) of the weights"),
        Option(
            "--init-from",
            metavar="PATH",
            says="start weights of the run, for an export of a file that leaves them out [the "
            "run's final.pt, or its init_from]",
        ),
        Option(_ALL, says="prune the best checkpoint and the permanent ones, too"),
        Option(_DRY_RUN, says="list the checkpoints that prune would delete, and keep them"),
        replace(NAME, says="name of the run, for checkpoints/NAME [the newest run]"),
        CHECKPOINT_DIR,
        JSON,
    ),
    words_max=2,
    perform=_run,
)
