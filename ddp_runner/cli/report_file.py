"""``report --html FILE``: a run as one file for a browser. Needs plotly's script, of the extra ``report`` or ``page``."""

from __future__ import annotations

import sys
import time
from importlib import util
from pathlib import Path

from ddp_runner import start
from ddp_runner.cli.output import show
from ddp_runner.core.exits import ExitCode
from ddp_runner.core.faults import BadInputError
from ddp_runner.observe.format import byte_size
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.observe.reports.html_page import html_report
from ddp_runner.observe.summary import RunSummary, read_summary
from ddp_runner.start import COMMAND
from ddp_runner.system.run_files import replace_file
from ddp_runner.version import VERSION

_SCRIPT = Path("package_data", "plotly.min.js")


def write_html(directory: Path, given: str) -> int:
    """Write the file; the exit code. Raises BadInputError where it cannot be written, or plotly is missing."""
    path = Path(given).expanduser()
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
    wanted = "`pip install 'ddp_runner[report]'`"
    if start.IS_CHECKOUT:
        wanted = f"`{COMMAND} environment --extra report`, or `pip install 'plotly>=5.18,<7'`"
    raise BadInputError(
        "--html", given, f"plotly, which draws it, is not installed for {sys.executable}: {wanted}"
    )
