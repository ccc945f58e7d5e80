"""The other commands as functions of a program: a supervised script, a benchmark, the largest batch. See launch."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddp_runner.cli.commands import commands
from ddp_runner.cli.from_code.launch import Prepared, identity, prepared, refuse_in_rank, run_child
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Literal

    from ddp_runner.cli.from_code.launch import RunResult

_ERROR = "ddp_runner: error: "
LARGEST = "the largest that fits is"  # begins the line of --find-batch-size with its result


def run(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    nproc_per_node: int | Literal["auto", "cpu", "gpu"] = "auto",
    options: Sequence[str] = (),
) -> RunResult:
    """Run a script under the supervisor, as ``ddp_runner run`` does; blocks until done.

    ``arguments`` are the script's own; ``options`` are words of the command, such as
    ``("--max-restarts=3", "-l", "logs/a")``. Output, interrupts and signals are those of :func:`launch`.
    Raises BadInputError for wrong words, and RuntimeError when called by the ranks themselves.
    """
    refuse_in_rank("run()")
    words = ["--nproc-per-node", str(nproc_per_node), *options, str(script), *arguments]
    row = commands().get("run")
    if row is None:
        raise BadInputError("run", "", "is not installed")
    settings = import_module(row.module).settings_of(words)
    ready = Prepared(
        words=words,
        config_file="",
        settings=settings,
        before=identity(settings.run.log_dir),
    )
    return ready.result(run_child("run", words))


def bench(
    task: str | type | None = None,
    *,
    nproc: int | Literal["auto"] = "auto",
    config: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
    steps: int | None = None,
) -> dict[str, Any]:
    """Measure what a step's time is made of, as ``ddp_runner bench --json`` does; the object that it prints.

    The parameters are those of :func:`launch`. The run itself, if there is one, is left alone.
    Raises BadInputError for wrong settings and RuntimeError where the measurement fails.
    """
    with _ready("bench()", task, nproc, config, arguments) as ready:
        lines: list[str] = []
        asked = [] if steps is None else ["--steps", str(steps)]
        words = [*ready.words, *asked, "--json"]
        code = run_child("bench", words, config_file=ready.config_file, take=lines.append)
        found: dict[str, Any] = json.loads(_last(lines, "{", "bench()", code))
        return found


def find_batch_size(
    task: str | type | None = None,
    *,
    nproc: int | Literal["auto"] = "auto",
    config: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
    share: float | None = None,
) -> int:
    """Find the largest batch of a rank that fits into ``share`` of its memory, as ``--find-batch-size`` does.

    The other parameters are those of :func:`launch`; each size that is tried is shown.
    Raises BadInputError for wrong settings and RuntimeError where not even the smallest batch fits.
    """
    with _ready("find_batch_size()", task, nproc, config, arguments) as ready:
        lines: list[str] = []

        def take(line: str) -> None:
            lines.append(line)
            sys.stdout.write(line)

        option = "--find-batch-size" if share is None else f"--find-batch-size={share}"
        words = [*ready.words, option]
        code = run_child("train", words, config_file=ready.config_file, take=take)
        line = _last(lines, LARGEST, "find_batch_size()", code)
        return int(re.sub(r"\D", "", line.partition(";")[0]))


@contextmanager
def _ready(
    called: str,
    task: str | type | None,
    nproc: int | Literal["auto"],
    config: Mapping[str, object] | None,
    arguments: Sequence[str],
) -> Iterator[Prepared]:
    refuse_in_rank(called)
    with prepared(task, nproc=nproc, config=config, arguments=arguments) as ready:
        yield ready


def _last(lines: Sequence[str], begin: str, called: str, code: int) -> str:
    """The last line with this begin. Without one, raises what the command has said, or that it has."""
    said = "see its error line"
    for line in reversed(lines):
        if line.startswith(begin):
            return line
        if line.startswith(_ERROR):
            said = line.removeprefix(_ERROR).strip()
    if code == ExitCode.BAD_USAGE:
        raise BadInputError(called, "", f"was refused: {said}")
    raise RuntimeError(f"{called} ended with exit code {code}: {said}")
