"""The command: runs the parts one after another and keeps ``facts.json``. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gpu.conducting import Ended, conduct
from tests.gpu.facts import REHEARSAL

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 535.0  # of all parts; a machine may be lent for ten minutes
SHOWN_CHARS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``module`` has ``measure(facts)``; ``shown`` are the facts for the console, as dotted paths."""

    name: str
    module: str
    limit_s: float
    shown: tuple[str, ...] = ()


PARTS = (
    Part(
        name="machine",
        module="tests.gpu.machine",
        limit_s=50,
        shown=("versions.gpu", "start.context_s", "killed.free_s", "board.behind_kernel"),
    ),
    Part(
        name="nccl",
        module="tests.gpu.nccl",
        limit_s=105,
        shown=("cycle_eager.form_s.median", "behind_kernels.5s.abort_s", "while_enqueuing.ended"),
    ),
    Part(
        name="two_ranks",
        module="tests.gpu.two_ranks",
        limit_s=10,
        shown=("plain.rank0.error", "shared.rank0.error", "partial_abort.rank1.is_wrong_and_whole"),
    ),
    Part(
        name="shared",
        module="tests.gpu.shared",
        limit_s=115,
        shown=(
            "sums_2.rank0.wrong",
            "faults_2.verdict",
            "faults_3.verdict",
            "special.verdict",
            "repairs.spare_true.kill_1.repaired_s",
        ),
    ),
    Part(
        name="one_rank",
        module="tests.gpu.one_rank",
        limit_s=130,
        shown=(
            "faults.verdict",
            "special.verdict",
            "ours_ms",
            "ddp_loop.ms",
            "syncs.a_step",
            "save_4gb.blocked_s",
        ),
    ),
    Part(
        name="programs",
        module="tests.gpu.programs",
        limit_s=75,
        shown=(
            "loop.verdict",
            "transformers.verdict",
            "accelerate.verdict",
            "lightning.verdict",
            "eight.verdict",
        ),
    ),
    Part(name="classes", module="tests.gpu.repairs", limit_s=25, shown=("faster", "repaired_s")),
    Part(name="marked", module="tests.gpu.marked", limit_s=25, shown=("passed", "failed")),
)


class FactsFile:
    """``facts.json``: a key a part, replaced at each fact. One writer: the command."""

    def __init__(self, path):
        self._path = path
        self._parts = {}

    def begin(self, name):
        """A part has begun."""
        self._parts[name] = {"seconds": 0.0, "outcome": "running", "why": "", "facts": {}}
        self._write()

    def fact(self, name, path, value):
        """A part says that ``path``, keys from the outside in, is ``value``."""
        at = self._parts[name]["facts"]
        for key in path[:-1]:
            below = at.setdefault(key, {})
            if not isinstance(below, dict):
                below = at[key] = {"": below}
            at = below
        at[path[-1]] = {**at[path[-1]], **value} if _are_dicts(at.get(path[-1]), value) else value
        self._write()

    def end(self, name, ended):
        """A part is over."""
        self._parts[name].update(asdict(ended))
        self._write()

    def of(self, name):
        """What is known of a part."""
        return self._parts[name]

    def _write(self):
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text(json.dumps(self._parts, indent=1), encoding="utf-8")
        temporary.replace(self._path)


def _are_dicts(*values):
    return all(isinstance(value, dict) for value in values)


def look_up(facts, dotted):
    """The fact at a dotted path; None where there is none."""
    at = facts
    for key in dotted.split("."):
        if not isinstance(at, dict) or key not in at:
            return None
        at = at[key]
    return at


def errors_in(facts):
    """The dotted paths of measurements that failed."""
    found = []
    for key, value in facts.items() if isinstance(facts, dict) else ():
        if isinstance(value, dict):
            here = [""] if {"error", "ended"} & value.keys() else []
            found += [f"{key}.{path}".rstrip(".") for path in [*here, *errors_in(value)]]
    return found


def row(part, known):
    """A part in one line: outcome, seconds, what to read first."""
    facts = known["facts"]
    said = [f"{path}={_short(look_up(facts, path))}" for path in part.shown if facts]
    errors = errors_in(facts)
    if errors:
        said.append(f"{len(errors)} errors: {', '.join(errors)}")
    text = "; ".join(([known["why"]] if known["why"] else []) + said)
    return (
        f"{part.name:10} {known['outcome']:8} {known['seconds']:6.1f} s  {text[: 2 * SHOWN_CHARS]}"
    )


def _short(value):
    text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    return text if len(text) <= SHOWN_CHARS // 2 else text[: SHOWN_CHARS // 2] + "..."


def last_line(parts, file, path):
    """What to read first."""
    outcomes = [file.of(part.name)["outcome"] for part in parts]
    if set(outcomes) == {"skipped"}:
        why = file.of(parts[0].name)["why"]
        return f"nothing was measured: {why}; facts: {path}"
    bad = [part.name for part in parts if file.of(part.name)["outcome"] in ("failed", "timeout")]
    reported = f"not whole: {', '.join(bad)}" if bad else "every part came to its end"
    wrong = sum(len(errors_in(file.of(part.name)["facts"])) for part in parts)
    reported += f", {wrong} measurements failed" if wrong else ""
    return f"{outcomes.count('ok')} of {len(parts)} parts ok; {reported}; facts: {path}"


def unpacked(wheels, folder):
    """Unpack every wheel of ``wheels`` into ``folder``; their names."""
    names = []
    for wheel in sorted(Path(wheels).glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        names.append(wheel.name)
    return names


def chosen(asked):
    """The parts to run: of the table, or ``NAME=MODULE:SECONDS`` for one of one's own."""
    if not asked:
        return PARTS
    known = {part.name: part for part in PARTS}
    parts = []
    for one in asked.split(","):
        name, _, rest = one.partition("=")
        module, _, limit = rest.partition(":")
        if not rest and name not in known:
            raise SystemExit(f"error: no part {name!r}; there are {', '.join(known)}")
        parts.append(
            Part(name=name, module=module, limit_s=float(limit or 30)) if rest else known[name]
        )
    return tuple(parts)


def parse(words):
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for facts.json and log.txt")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of what is missing here")
    parser.add_argument("--only", default="", help="parts to run, by name, separated by commas")
    parser.add_argument("--rehearse", action="store_true", help="all on the CPU; no fact counts")
    return parser.parse_args(words)


def main(words=None):
    """The exit code: 1 where a part failed or was ended."""
    asked = parse(words)
    parts = chosen(asked.only)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "facts.json"
    file = FactsFile(path)
    with tempfile.TemporaryDirectory(prefix="gpu_facts_", ignore_cleanup_errors=True) as scratch:
        searched = [str(ROOT)]
        if asked.wheels is not None:
            site = Path(scratch, "site")
            print(f"wheels: {', '.join(unpacked(asked.wheels, site)) or 'none'}", flush=True)
            searched.append(str(site))
        searched += filter(None, os.environ.get("PYTHONPATH", "").split(":"))
        env = {**os.environ, "PYTHONPATH": ":".join(searched), "PYTHONUNBUFFERED": "1"}
        env |= {
            "TMPDIR": scratch,
            "OPENBLAS_NUM_THREADS": "1",
        }  # parts fork: one thread, as a zygote
        if asked.rehearse:
            env[REHEARSAL] = "1"
        _run_all(parts, file, env=env, log_path=asked.out / "log.txt")
    print()
    for part in parts:
        print(row(part, file.of(part.name)))
    print(last_line(parts, file, path), flush=True)
    return int(any(file.of(part.name)["outcome"] in ("failed", "timeout") for part in parts))


def _run_all(parts, file, *, env, log_path):
    end_s = time.monotonic() + TOTAL_S
    with log_path.open("ab") as log:
        for part in parts:
            file.begin(part.name)
            limit_s = min(part.limit_s, end_s - time.monotonic())
            if limit_s < 1:
                ended = Ended(outcome="skipped", seconds=0.0, why="no time left")
            else:
                log.write(f"\n===== {part.name} =====\n".encode())
                log.flush()
                ended = _run(part, file, env=env, log=log, limit_s=limit_s)
            file.end(part.name, ended)
            print(f"{part.name}: {ended.outcome}, {ended.seconds:.1f} s {ended.why}", flush=True)


def _run(part, file, *, env, log, limit_s):
    words = (sys.executable, "-m", "tests.gpu.part", part.module, f"{limit_s:g}", str(os.getpid()))
    try:
        return conduct(
            words,
            env=env,
            cwd=ROOT,
            limit_s=limit_s,
            log=log,
            on_fact=lambda path, value: file.fact(part.name, path, value),
        )
    except Exception as error:  # noqa: BLE001 - never stops the others
        return Ended(outcome="failed", seconds=0.0, why=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
