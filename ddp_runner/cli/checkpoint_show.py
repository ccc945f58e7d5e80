"""``checkpoints show``: what a checkpoint holds, by its manifest, and whether it can be trusted."""

from __future__ import annotations

import difflib
import json
import sys
from typing import TYPE_CHECKING

from ddp_runner import config
from ddp_runner.checkpoint.manifest import best_of, stage_name
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import HIDDEN, holds_secret
from ddp_runner.observe.format import byte_size, count, counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddp_runner.checkpoint.catalog import Catalog, Entry
    from ddp_runner.checkpoint.manifest import Manifest

_LABEL_COLUMNS = 13


def chosen(catalog: Catalog, which: str) -> Entry:
    """The checkpoint that a word, a step number or a path names. Raises BadInputError."""
    if which.isdecimal():
        found = [entry for entry in catalog.entries() if entry.step == int(which)]
        what = f"has no checkpoint in {catalog.directory}; checkpoints list shows them"
    elif which in ("none", ""):
        raise BadInputError(which or "''", "", "must be last, best, a step or a path")
    elif which == "best":
        best = catalog.best()
        found = [] if best is None else [best]
        what = f"{catalog.directory} holds no checkpoint with a metric to choose the best by"
    else:
        try:
            resolved = catalog.resolve("last" if which == "auto" else which)
        except BadInputError as error:  # which is about --resume
            why = error.expected.partition(";")[0]
            near = difflib.get_close_matches(which, ("last", "best"), n=1)
            hint = f"did you mean {near[0]}?" if near else "must be last, best, a step or a path"
            raise BadInputError(which, "", f"{why}; {hint}") from error
        found = [entry for entry in resolved if entry.problem is None] or resolved
        for passed_over in resolved[: resolved.index(found[0])] if found else ():
            text = f"{passed_over.path} is passed over: {passed_over.problem}"
            print(f"ddp_runner: {printable(text)}", file=sys.stderr)
        what = f"{catalog.directory} holds no checkpoint"
    if not found:
        raise BadInputError(which, "", what)
    return found[0]


def short_record(entry: Entry, *, problem: str | None, is_best: bool) -> dict[str, object]:
    """Return what a list shows of a checkpoint, as plain values."""
    manifest = entry.manifest
    return {
        "step": entry.step,
        "path": str(entry.path),
        "size_bytes": manifest.size_bytes if manifest else None,
        "epoch": manifest.epoch if manifest else None,
        **({"stage": stage} if (stage := stage_name(manifest)) else {}),
        "monitored": manifest.monitored if manifest else None,
        "monitor": manifest.monitor if manifest else "",
        "created_utc": manifest.created_utc if manifest else None,
        "best": is_best,
        "problem": problem,
    }


def record_of(catalog: Catalog, entry: Entry) -> dict[str, object]:
    """All of it as plain values, for ``--json``. Reads the whole file to verify it."""
    manifest, best = entry.manifest, catalog.best()
    is_best = best is not None and best.step == entry.step
    found = short_record(entry, problem=catalog.verify(entry), is_best=is_best)
    if manifest is None:
        return found
    return found | {
        "samples": manifest.samples,
        "sha256": manifest.sha256,
        "hashed": manifest.hashed,
        "reason": manifest.reason,
        "run_id": manifest.run_id,
        "mode": manifest.mode,
        "versions": dict(manifest.versions),
        "leaves_out": bool(manifest.start_sha256),
        **{name: manifest.about.get(name) for name in ("tokens", "loss", "figures", "trackers")},
        "best_so_far": _best_so_far(manifest),
        "settings": changed_settings(manifest),
        "task": task_facts(manifest),
    }


def _best_so_far(manifest: Manifest) -> dict[str, object] | None:
    """Step and value, whose file may be gone."""
    known = best_of(manifest)
    return None if not known else {"step": known[0][1], "value": known[0][0]}


def changed_settings(manifest: Manifest) -> dict[str, object]:
    """Return the settings that the user has set, by dotted name; empty if a file does not record them."""
    given = manifest.about.get("settings")
    if not isinstance(given, dict):
        return {}
    found = {
        f"{section}.{name}": value
        for section, values in given.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }
    return {key: value for key, value in found.items() if not config.is_usual(key, found)}


def task_facts(manifest: Manifest) -> dict[str, object]:
    """Return the facts that the task describes about itself, by its own names, and its data's fingerprint."""
    return {
        key.removeprefix(config.described_key("")): HIDDEN if holds_secret(key, value) else value
        for key, value in manifest.meaning.items()
        if config.is_described(key) or key == "data fingerprint"
    }


def lines_of(record: Mapping[str, object]) -> Iterator[str]:
    """A record for people."""
    yield _line("checkpoint", str(record["path"]))
    problem = record["problem"]
    if record["epoch"] is None:  # without a manifest
        yield _line("verified", f"BAD: {problem}" if problem else "by its archive; no manifest")
        return
    of_stage = f" of stage {record['stage']}" if "stage" in record else ""
    what = [f"{count(_whole(record['step']))}{of_stage}"]
    what.append(counted(_whole(record["epoch"]), "complete epoch"))
    what.append(counted(_whole(record["samples"]), "sample"))
    if isinstance(tokens := record.get("tokens"), (int, float)):
        what.append(f"{tokens:,.0f} tokens")
    yield _line("step", ", ".join(what) + (", the best" if record["best"] else ""))
    yield _line("written", f"{record['created_utc']} ({record['reason']}), run {record['run_id']}")
    yield _line("size", byte_size(_whole(record["size_bytes"])))
    yield _line("verified", f"BAD: {problem}" if problem else f"yes, SHA-256 {record['sha256']}")
    yield from _figures(record)
    for label, key in (("settings", "settings"), ("task", "task"), ("made with", "versions")):
        values = record[key]
        if isinstance(values, dict) and values:
            for name, value in values.items():
                text = value if isinstance(value, str) else json.dumps(value)
                yield _line(label, f"{name}={text}")
                label = ""  # noqa: PLW2901 - beside the first only
    if record["leaves_out"]:
        yield _line("leaves out", "start weights of the run (checkpoint.only_trained)")


def _figures(record: Mapping[str, object]) -> Iterator[str]:
    """Yield lines with the values measured so far, and the trackers that have them too."""
    figures, monitor = record.get("figures"), record["monitor"]
    losses = {"training loss": record.get("loss"), "monitored": record["monitored"]}
    if isinstance(figures, dict):
        losses |= figures
        if monitor in figures:
            del losses["monitored"]  # it has a name of its own
    if shown := [f"{name} {v:.4f}" for name, v in losses.items() if isinstance(v, (int, float))]:
        yield _line("losses", ", ".join(shown))
    if isinstance(best := record.get("best_so_far"), dict):
        named = f"{monitor} " if monitor else ""
        yield _line(
            "best so far", f"{named}{best['value']:.4f} at step {count(_whole(best['step']))}"
        )
    if isinstance(trackers := record.get("trackers"), dict):
        for name, known in trackers.items():
            yield _line("tracker", f"{name} {known['id']} {known['link']}".strip())


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _line(label: str, text: str) -> str:
    return f" {label:<{_LABEL_COLUMNS}} {text}"
