"""What ``report --html`` writes, opened from a disk in a real browser without a network."""

from __future__ import annotations

import json

import pytest

from ddp_runner.__main__ import main
from ddp_runner.observe.summary import write_summary
from tests.cli.test_commands import SUMMARY
from tests.features.page.driven import browser, one_browser, poll
from tests.observe.history.test_run_history import KILLED, point, write

pytestmark = [one_browser, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
_DRAWN = """
const plot = document.getElementById(arguments[0]);
return plot && plot.data ? plot.data.map(one => one.name).concat(plot.layout.xaxis.title.text) : [];
"""
_WIDTHS = "return [document.documentElement.scrollWidth, innerWidth]"


def test_a_report_opens_from_a_disk(tmp_path):
    """Curves and timeline are drawn, over steps and over time; faults open by the keyboard; 400 px are enough."""
    logs = tmp_path / "logs"
    logs.mkdir()
    write_summary(logs / "summary.json", SUMMARY)
    status = {"state": "done", "step": 50, "max_steps": 50, "ranks": [{"rank": 0}, {"rank": 1}]}
    (logs / "status.json").write_text(json.dumps(status))
    write(logs / "metrics.jsonl", [point(s, rank=r, loss=9 / s, step_s=0.1) for s in range(1, 50) for r in (0, 1)])  # fmt: skip
    write(logs / "events.jsonl", KILLED)
    file = tmp_path / "report.html"
    assert main(["report", "-l", str(logs), "--html", str(file)]) == 0
    for width, dark in ((1200, False), (400, True)):
        with browser(width, height=2400, dark=dark) as driver:
            driver.get(file.as_uri())
            drawn = poll(lambda: driver.execute_script(_DRAWN, "timeline"), timeout_s=10, what="it")
            assert {"training", "waiting for a repair", "lost"} <= set(drawn)
            drawn = driver.execute_script(_DRAWN, "curves")
            assert {"loss", "rank 1", "fault", "repair", "save", "step"} <= set(drawn)
            driver.find_element("css selector", "button[data-axis=time]").click()
            assert "hours" in driver.execute_script(_DRAWN, "curves")
            driver.find_element("css selector", "details summary").send_keys("\n")
            shown = driver.find_element("css selector", "details[open]").text
            assert "lost their peer: rank 0" in shown
            widths = driver.execute_script(_WIDTHS)
            assert widths[0] <= widths[1]
            assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []
            driver.save_screenshot(str(tmp_path / f"report_{width}.png"))
