"""``report --compare A B``: two runs that have ended, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap

from ddp_runner.cli.arguments import SmallArguments
from ddp_runner.cli.output import is_unicode, show
from ddp_runner.cli.runs import log_dir_of
from ddp_runner.config.run_names import is_name
from ddp_runner.core.exits import ExitCode
from ddp_runner.core.faults import BadInputError
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.observe.reports.comparison import ComparedRow, compared, differing_settings
from ddp_runner.observe.reports.ended_run import EndedRun
from ddp_runner.observe.script_summary import read_script_summary
from ddp_runner.observe.summary import read_summary

_NAME_COLUMNS_MAX, _VALUE_COLUMNS = 36, 24


def compare(words: Sequence[str]) -> int:
    """Print both; the exit code. Raises BadInputError for what is no run that has ended."""
    first, second = (_ended(word) for word in words)
    _show_rows(compared(first, second, unicode=is_unicode()))
    settings = list(differing_settings(first, second))
    show("")
    show("settings that differ" if settings else "settings: all the same")
    _show_rows(settings)
    return ExitCode.DONE


def _ended(word: str) -> EndedRun:
    if Path(word).expanduser().is_dir():
        folder = log_dir_of(SmallArguments(values={"--log-dir": word}))
    elif is_name(word):
        folder = log_dir_of(SmallArguments(values={"--name": word}))
    else:
        raise BadInputError("--compare", word, "is no log folder, and no name of a run")
    try:
        if read_script_summary(folder / "summary.json") is not None:
            expected = "is the run of a script, which has nothing to compare"
            raise BadInputError("--compare", word, expected)
        summary = read_summary(folder / "summary.json")
    except FileNotFoundError:
        raise BadInputError("--compare", word, "has no summary.json: it has not ended") from None
    except (OSError, ValueError, TypeError, OverflowError, AttributeError) as error:  # not by us
        raise BadInputError("--compare", word, f"its summary.json cannot be read: {error}") from error  # fmt: skip
    history = RunHistory(folder)
    history.read()
    return EndedRun.of(history, summary)


def _show_rows(rows: Sequence[ComparedRow]) -> None:
    names = min(_NAME_COLUMNS_MAX, max((len(row.name) for row in rows), default=0))
    widths = (names, _VALUE_COLUMNS, _VALUE_COLUMNS)
    for row in rows:
        columns = zip((row.name, row.first, row.second), widths, strict=True)
        # As it stands where it fits: the names of parts are indented.
        cells = [[text] if len(text) <= width else wrap(text, width) for text, width in columns]
        for number, parts in enumerate(zip_longest(*cells, fillvalue="")):
            line = "  ".join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True))
            show(f"{line}  {row.change if number == 0 else ''}".rstrip())
