"""``report``: what happened in a run, read from its log directory, for people."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ddp_runner.cli.command import LOG_DIR, NAME, Arguments, SmallCommand, is_unicode, show
from ddp_runner.cli.extras import how_to_install
from ddp_runner.cli.runs import elsewhere, log_dir_of
from ddp_runner.config.run_names import at_home
from ddp_runner.core.monitor import LOSS, is_of_evaluation, parts_of
from ddp_runner.core.settings.declaration import Option
from ddp_runner.features.report.html_page import html_report
from ddp_runner.features.report.improvements import EndedRun, Improvement, improvements
from ddp_runner.features.report.report_comparison import compare
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.rules.lifecycle import RunState
from ddp_runner.kernel.system.run_files import from_json, read_lines, read_small, replace_file
from ddp_runner.observe.format import (
    bar,
    byte_size,
    count,
    counted,
    duration,
    figure,
    percent,
    sparkline,
)
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.observe.progress_report import rows_block, summary_rows
from ddp_runner.observe.summary import (
    RunSummary,
    TimeShares,
    other_report,
    read_summary,
    time_parts,
)
from ddp_runner.start import COMMAND
from ddp_runner.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddp_runner.observe.history.metrics_history import Curves


_COMPARE = "--compare"
_RANKS_SHOWN_MAX = 8  # of more, the fastest, the middle one and the slowest
_GPUS_SHOWN_MAX, _EPOCHS_SHOWN_MAX = 8, 8
_FAULTS_SHOWN_MAX = 20
_COLUMNS, _CURVE_LABELS = 80, 17
_ENDED = (RunState.DONE.value, RunState.FAILED.value)


def _run(arguments: Arguments) -> int:
    """Print the report. Raises BadInputError where there is no run to report on."""
    if _COMPARE in arguments.switches:
        _refuse_beside_compare(arguments)
        return compare(arguments.words)
    if arguments.words:
        raise BadInputError(arguments.words[0], "", "unexpected word; --help shows the usage")
    directory = log_dir_of(arguments)
    if (file := arguments.values.get("--html")) is not None:
        return write_html(directory, file)
    text = str(directory)
    try:
        other = other_report(directory / "summary.json")
        summary = None if other is not None else read_summary(directory / "summary.json")
        rows = [] if summary is None else _rows(summary)
    except FileNotFoundError:
        return _report_unfinished(text, directory)
    except (OSError, ValueError, TypeError, OverflowError, AttributeError) as error:  # not by us
        raise BadInputError(
            "--log-dir", text, f"its summary.json cannot be read: {error}"
        ) from error
    rows.append(("events", _events(directory / "events.jsonl")))
    for line in (*(other.lines if other else ()), *rows_block(rows, width=_COLUMNS)):
        show(line)
    if summary is not None:
        _show_course(directory, summary)
    return ExitCode.DONE


def _show_course(directory: Path, summary: RunSummary) -> None:
    """Curves, where the time went, and what to improve."""
    history = RunHistory(directory)
    history.read()
    run = EndedRun.of(history, summary)
    unicode = is_unicode()
    show("")
    for line in (
        *curve_lines(run.curves, labels=_CURVE_LABELS, unicode=unicode),
        *time_lines(summary.time_s, wall_s=summary.wall_s, labels=_CURVE_LABELS, unicode=unicode),
        *improvement_lines(improvements(run), labels=_CURVE_LABELS),
    ):
        show(line)


def _refuse_beside_compare(arguments: Arguments) -> None:
    beside = sorted(arguments.values)
    if beside:
        raise BadInputError(_COMPARE, "", f"takes two runs, and no {beside[0]}")
    if len(arguments.words) != 2:
        raise BadInputError(_COMPARE, " ".join(arguments.words), "needs two runs: --compare A B")


def _report_unfinished(text: str, directory: Path) -> int:
    """A run that goes on, or that could not sum up: its newest status, and whether it is alive."""
    try:
        status = from_json(read_small(directory / "status.json"))
        pid, state = int(status["pid"]), str(status["state"])
        steps = int(status["max_steps"] or 0)  # nobody knows a script's
        place = (
            f"at step {count(int(status['step']))}{f' of {count(steps)}' if steps else ''}, "
            f"{counted(int(status['world_size']), 'rank')}, "
            f"{counted(int(status['faults_total']), 'fault')}"
        )
        name = f"{status['name']} " if status.get("name") else ""
        run = f"run {name}{status['run_id']}"
        host = str(status.get("host") or socket.gethostname())
    except FileNotFoundError:
        where = elsewhere(directory)
        raise BadInputError("--log-dir", text, f"holds no run: no summary.json{where}") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise BadInputError("--log-dir", text, "its status.json cannot be read") from error
    if host != socket.gethostname() and state not in _ENDED:  # in a folder that machines share
        old_s = max(0.0, time.time() - (directory / "status.json").stat().st_mtime)
        show(f"{run}: {state} {place}")
        show(f"no summary yet: the run is on {host}, and wrote its status {duration(old_s)} ago")
    elif _is_alive(pid):
        show(f"{run}: {state} {place}")
        show(f"no summary yet: the run is still training (process {pid})")
    elif state in _ENDED:
        show(f"{run}: {state} {place}")
        show("the run has ended, but its summary.json is missing")
    else:
        show(f"{run}: last seen {state} {place}")
        show(f"the run is no longer alive (no process {pid} here); its end was not recorded")
        show("the same command resumes it")
    return ExitCode.DONE


def _is_alive(pid: int) -> bool:
    """Return True if there is such a process, of any user."""
    if pid <= 0:
        return False  # of no process: the numbers of groups
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Return labels and values: those of the end of a run, and what only a report shows."""
    own = _own_times(summary)
    return [
        *summary_rows(summary, faults_max=_FAULTS_SHOWN_MAX),
        ("exit code", str(int(summary.exit_code))),
        ("epochs", count(summary.epochs)),
        *([("own time", own)] if own else []),
        *_gpu_rows(summary),
    ]


def _own_times(summary: RunSummary) -> str:
    """Return each rank's own part of a step, which shows the ranks that made others wait."""
    times = [(f"rank {rank}", seconds * 1e3) for rank, seconds in summary.own_step_s.items()]
    if len(times) > _RANKS_SHOWN_MAX:
        by_time = sorted(times, key=lambda one: one[1])
        times = [by_time[0], by_time[len(by_time) // 2], by_time[-1]]
    parts = [f"{who} {time_ms:.1f} ms" for who, time_ms in times]
    slow = [
        f"rank {rank} persistently {factor:.1f} times as slow as the others"
        for rank, factor in summary.stragglers.items()
    ]
    return "; ".join([", ".join(parts) + " a step outside collectives", *slow]) if parts else ""


def _gpu_rows(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield the use of GPUs: a row for each one, then one for each of the newest epochs, over all GPUs."""
    gpus = sorted(summary.gpus.items())
    for name, record in gpus[:_GPUS_SHOWN_MAX]:
        if isinstance(record, dict) and (use := gpu_use([record])):
            yield f"GPU {name}", use
    if len(gpus) > _GPUS_SHOWN_MAX:
        yield "", f"and {len(gpus) - _GPUS_SHOWN_MAX} more in summary.json"
    for epoch in summary.gpu_epochs[-_EPOCHS_SHOWN_MAX:]:
        if use := gpu_use(list(epoch["gpus"].values())):
            yield f"GPUs, epoch {epoch['epoch'] + 1}", use


def _events(path: Path) -> str:
    """Return the number of times that each event was written, or why there is no journal."""
    try:
        counts = Counter(map(_event_name, read_lines(path)))
    except FileNotFoundError:  # of a DDPTrainer in a plain script
        return f"none: there is no {path.name}, which a supervised run writes"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return ", ".join(f"{name} {number}" for name, number in counts.items())


def _event_name(line: bytes) -> str:
    try:
        return str(from_json(line)["event"])
    except (ValueError, KeyError, TypeError):
        return "(unreadable line)"


# Lines about a run that was read: curves, where the time went, what to change first. Pure.

CURVE_COLUMNS, BAR_COLUMNS = 40, 30
IMPROVEMENTS_SHOWN_MAX = 3
_LINE_COLUMNS = 79
_SHOWN_FIRST, _SHOWN_LAST = ("loss",), ("grad_norm", "samples_per_s", "tokens_per_s")
_EVALUATED_MAX = 8


def curve_lines(curves: Curves, *, labels: int, unicode: bool) -> Iterator[str]:
    """A line for each of the main figures: name, curve, first and last value."""
    evaluated = sorted(filter(is_of_evaluation, curves.names()), key=_losses_first)
    for name in (*_SHOWN_FIRST, *evaluated[:_EVALUATED_MAX], *_SHOWN_LAST):
        series = curves.of_run(name)
        known = [value for value in series.values if math.isfinite(value)]
        if len(known) < 2:
            continue
        drawn = sparkline(series.values, columns=CURVE_COLUMNS, unicode=unicode)
        title = name.replace("_per_s", "/s").replace("_", " ")
        arrow = "→" if unicode else "->"
        ends = f"{figure(known[0])} {arrow} {figure(known[-1])}"
        yield f"{title:<{labels - 1}} {drawn}  {ends}, {count(len(known))} points"


def _losses_first(name: str) -> tuple[bool, str]:
    return parts_of(name)[1] != LOSS, name


def time_lines(time_s: TimeShares, *, wall_s: float, labels: int, unicode: bool) -> Iterator[str]:
    """A bar for each part of the time, longest first."""
    shares = sorted(time_parts(time_s), key=lambda one: -one[1])
    for place, (name, seconds) in enumerate(shares if wall_s > 0 else ()):
        drawn = bar(seconds / wall_s, columns=BAR_COLUMNS, unicode=unicode)
        label = "where it went" if place == 0 else ""
        text = f"{name:<12} {duration(seconds):>8} {percent(seconds / wall_s):>4}  {drawn}"
        yield f"{label:<{labels}}{text}".rstrip()


_GPU_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("use", "use", percent),
    ("memory_used_bytes", "memory", byte_size),
    ("memory_efficiency", "memory efficiency", percent),
    ("temperature_c", "temperature", lambda value: f"{value:.0f} °C"),
    ("power_w", "power", lambda value: f"{value:.0f} W"),
)


def gpu_use(records: Sequence[Mapping[str, Any]]) -> str:
    """Means over GPUs with the highest peak, as text; empty where nothing is known of any."""
    shown = []
    for name, title, form in _GPU_FIGURES:
        known = [one[name] for one in records if isinstance(one.get(name), Mapping)]
        if known:
            mean = sum(one["mean"] for one in known) / len(known)
            peak = form(max(one["peak"] for one in known))
            text = form(mean)
            shown.append(f"{title} {text}" + (f" (peak {peak})" if peak != text else ""))
    return ", ".join(shown)


def improvement_lines(found: Sequence[Improvement], *, labels: int) -> Iterator[str]:
    """Yield the suggested changes, each setting below its cost; or a line that says that nothing stands out."""
    if not found:
        yield f"{'improve':<{labels}}nothing stands out: data, saves, ranks and restarts took little"
    for place, one in enumerate(found[:IMPROVEMENTS_SHOWN_MAX]):
        label = "improve" if place == 0 else ""
        yield f"{label:<{labels}}{place + 1}. {one.what}"
        for line in wrap(f"-> {one.change}", max(30, _LINE_COLUMNS - labels - 3)):
            yield f"{'':<{labels}}   {line}"


# ``report --html FILE``: a run as one file for a browser. Needs plotly's script, of the extra
# ``report`` or ``page``.

_SCRIPT = Path("package_data", "plotly.min.js")


def write_html(directory: Path, given: str) -> int:
    """Write the file; the exit code. Raises BadInputError where it cannot be written, or plotly is missing."""
    path = at_home(given)
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder; give a file" if path.is_dir() else "its folder is not there"
        raise BadInputError("--html", given, what)
    plotly = _plotly(given)
    history = RunHistory(directory)
    history.read()
    if not history.status and not history.summary:
        raise BadInputError("--log-dir", directory, "holds no run: no summary.json")
    page = html_report(
        history, _summary(directory), plotly=plotly, now_s=time.time(), version=VERSION
    )
    data = page.encode(errors="replace")
    try:
        replace_file(path.absolute(), data)
    except OSError as error:
        raise BadInputError("--html", given, f"cannot be written: {error.strerror}") from error
    show(f"{given}: {byte_size(len(data))}, to be opened in any browser; it fetches nothing")
    return ExitCode.DONE


def _summary(directory: Path) -> RunSummary | None:
    """None of a run that goes on, was killed, or whose file nobody of us wrote."""
    try:
        return read_summary(directory / "summary.json")
    except (OSError, ValueError, TypeError, OverflowError, AttributeError):
        return None


def _plotly(given: str) -> str:
    """The library's own script, as its package has it."""
    found = util.find_spec("plotly")
    places = [] if found is None else found.submodule_search_locations or []
    files = [file for place in places if (file := Path(place) / _SCRIPT).is_file()]
    if files:
        return files[0].read_text(encoding="utf-8")
    missing = how_to_install("plotly, which draws it,", "plotly>=5.18,<7", extra="report")
    raise BadInputError("--html", given, missing)


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} report [--name NAME | -l DIR] [--html FILE]
        {COMMAND} report --compare A B

Shows how a run ended: result, curves, where the time went, what to improve
first, faults and their repair.""",
    options=(
        NAME,
        LOG_DIR,
        Option(
            "--html",
            metavar="FILE",
            says="write one HTML file instead: curves, timeline, faults, settings",
        ),
        Option(_COMPARE, metavar="A B", says="show two runs side by side; names or log folders"),
    ),
    words_max=2,
    perform=_run,
)
