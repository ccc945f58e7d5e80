"""``checkpoints list|verify``: which checkpoints there are, and whether each can be trusted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ddp_runner.checkpoint.catalog import Catalog, Entry
from ddp_runner.cli.arguments import CHECKPOINT_DIR, JSON, parse_small
from ddp_runner.cli.output import show
from ddp_runner.cli.runs import NAME, checkpoint_dir_of
from ddp_runner.core.exits import ExitCode
from ddp_runner.core.faults import BadInputError
from ddp_runner.observe.format import byte_size
from ddp_runner.start import COMMAND

if TYPE_CHECKING:
    from collections.abc import Sequence

_ACTIONS = ("list", "verify")
HELP = f"""Usage:  {COMMAND} checkpoints list|verify [--name NAME | -c DIR]
                                                [--json]

  list                      every checkpoint, newest first; reads no content
  verify                    read each one whole and compare it with its
                            manifest; exit 1 if one is bad

      --name NAME           those in checkpoints/NAME [the newest run's]
  -c, --checkpoint-dir DIR  those in DIR
      --json                one JSON object a line, for programs"""


def run(words: Sequence[str]) -> int:
    """List or verify; 1 if a verified checkpoint is bad. Raises BadInputError."""
    arguments = parse_small(words, valued=(CHECKPOINT_DIR, NAME), switches=(JSON,), words_max=1)
    if arguments.wants_help:
        print(HELP)
        return ExitCode.DONE
    action = arguments.words[0] if arguments.words else "list"
    if action not in _ACTIONS:
        raise BadInputError(action, "", "unknown action; use checkpoints list or verify")
    catalog = Catalog(checkpoint_dir_of(arguments))
    entries = catalog.entries()
    if not entries and JSON not in arguments.switches:
        show(f"{catalog.directory} holds no checkpoint")
    has_bad = False
    best = catalog.best()
    for entry in entries:
        reason = catalog.verify(entry) if action == "verify" else entry.problem
        has_bad = has_bad or (action == "verify" and reason is not None)
        is_best = best is not None and best.step == entry.step
        record = _record(entry, reason=reason, is_best=is_best)
        if JSON in arguments.switches:
            print(json.dumps(record))
        else:
            show(_line(entry, reason=reason, is_best=is_best, verified=action == "verify"))
    return ExitCode.FAILED if has_bad else ExitCode.DONE


def _record(entry: Entry, *, reason: str | None, is_best: bool) -> dict[str, object]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "path": str(entry.path),
        "size_bytes": manifest.size_bytes if manifest else None,
        "epoch": manifest.epoch if manifest else None,
        "monitored": manifest.monitored if manifest else None,
        "created_utc": manifest.created_utc if manifest else None,
        "best": is_best,
        "problem": reason,
    }


def _line(entry: Entry, *, reason: str | None, is_best: bool, verified: bool) -> str:
    manifest = entry.manifest
    cells = [f"step {entry.step:>8}"]
    if manifest is not None:
        monitored = "" if manifest.monitored is None else f"loss {manifest.monitored:.4f}"
        cells += [
            f"epoch {manifest.epoch:>3}",
            f"{byte_size(manifest.size_bytes):>8}",
            f"{monitored:<11}",
            manifest.created_utc[:19],
        ]
    cells.append(f"BAD: {reason}" if reason is not None else "ok" if verified else "")
    cells.append("best" if is_best else "")
    return "  ".join(cells).rstrip()
