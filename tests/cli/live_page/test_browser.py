"""The live page in a real browser, over a real run of which a rank is killed. Skipped where one of them is missing."""

from __future__ import annotations

import functools
import math
import signal
import time

import pytest

from tests.cli.live_page.driven import OPENS_WITHIN_S, Page, browser, click_tab, poll, shows
from tests.scenarios.harness import Run

pytestmark = [pytest.mark.whole_run, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SEEN_WITHIN_S = 2.0
_MARKS = """
const plot = document.querySelector('.ddp-curves');
const shown = (plot && plot.data || []).find(one => one.name === arguments[0]);
return shown ? shown.x.length : 0;
"""


def seconds_until_seen(driver, run, kills):
    """Kill rank 1, for the ``kills``th time, and wait for the mark and the row."""
    run.signal(signal.SIGKILL, run.rank_pid(1))
    killed_s = time.monotonic()
    rows = functools.partial(driver.find_elements, "css selector", ".ddp-fault")
    poll(
        lambda: driver.execute_script(_MARKS, "fault") == kills and len(rows()) == kills,
        timeout_s=OPENS_WITHIN_S,
        what="the mark and the row",
    )
    return time.monotonic() - killed_s


def test_a_killed_rank_is_seen_within_two_seconds(tmp_path):
    """As a mark and as a row; then a log is text, a stop from the page saves, and every view has been drawn."""
    evil = "<script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
    with Run(
        tmp_path / "run",
        "max_steps=100000",
        "task.samples=100000",
        "task.pace_s=0.05",
        "audit=true",
        "log_interval=5",
    ) as run:
        run.wait_for_step(30)
        with (run.logs / "rank_0.log").open("a") as log:
            log.write(f"{evil}\n")
        with Page(run.logs) as page, browser(1200) as driver:
            driver.get(f"{page.base}/?token={page.token}")
            shows(driver, "running")
            assert page.token not in driver.current_url
            driver.get(f"{page.base}/run/~")
            poll(
                lambda: driver.execute_script(_MARKS, "loss"),
                timeout_s=OPENS_WITHIN_S,
                what="curve",
            )
            assert driver.execute_script(_MARKS, "fault") == 0
            shows(driver, "Faults: none")
            kills, seen_s = 0, math.inf
            while (
                seen_s > SEEN_WITHIN_S
            ):  # others may have every core for a moment, not three times
                assert kills < 3, f"mark and row came after {seen_s:.1f} s"
                kills += 1
                seen_s = seconds_until_seen(driver, run, kills)
            marks = functools.partial(driver.execute_script, _MARKS, "repair")
            poll(lambda: marks() == kills, timeout_s=30, what="repair")
            driver.save_screenshot(str(tmp_path / "live_1200.png"))
            driver.find_element("css selector", ".ddp-fault .q-item").click()
            shows(driver, "plan: replace rank 1")
            click_tab(driver, "ranks")
            driver.find_element("css selector", "input[aria-label='search']").send_keys("onerror")
            shows(driver, evil)
            assert driver.execute_script("return window.evil") is None
            assert driver.execute_script("return document.querySelector('.ddp-log script')") is None
            for view in ("timeline", "ranks", "checkpoints", "settings"):
                click_tab(driver, view)
                time.sleep(1.0)  # for the picture; nothing is asserted on it
                driver.save_screenshot(str(tmp_path / f"{view}_1200.png"))
            steps = run.status()["step"]
            next(
                one for one in driver.find_elements("tag name", "button") if one.text == "stop"
            ).click()
            shows(driver, "Stop after this step?")
            dialog = driver.find_element("css selector", ".q-dialog")
            next(
                one for one in dialog.find_elements("tag name", "button") if one.text == "stop"
            ).click()
            assert run.wait() == 130
            assert run.summary()["checkpoint_step"] >= steps
            shows(driver, "interrupted")
            with browser(400, dark=True) as narrow:
                narrow.get(f"{page.base}/run/~")
                shows(narrow, f"Faults: {kills}")
                widths = narrow.execute_script(
                    "return [document.documentElement.scrollWidth, innerWidth]"
                )
                assert widths[0] <= widths[1]
                narrow.save_screenshot(str(tmp_path / "run_400.png"))
                for view in ("timeline", "ranks", "checkpoints", "settings"):
                    click_tab(narrow, view)
                    time.sleep(1.0)
                    narrow.save_screenshot(str(tmp_path / f"{view}_400.png"))


def test_nothing_but_the_runs_is_served(tmp_path):
    """Over real requests, with the routes of the libraries in it."""
    (tmp_path / "logs" / "one").mkdir(parents=True)
    (tmp_path / "logs" / "one" / "status.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("secret")
    with Page(tmp_path / "logs") as page:
        own = {"Origin": page.base, "Cookie": f"ddp_runner_page_{page.port}={page.token}"}
        assert page.status("/") == 200
        for path in ("/../secret.txt", "/run/../../secret.txt", "/..%2fsecret.txt", "/_nicegui/../../secret.txt",
                     "/_nicegui/auto/static/..%2f..%2f..%2fsecret.txt", "/docs", "/openapi.json"):  # fmt: skip
            assert page.status(path) == 404, path
        assert page.status("/", Host="rebound.example.org") == 403
        assert page.status("/", Origin="http://example.org") == 403
        assert page.status("/?token=wrong") == 403
        assert page.status("/act/one/stop", method="POST", **own | {"Cookie": ""}) == 403
        assert page.status("/act/one/stop", method="POST", **own | {"Origin": "http://x"}) == 403
        assert page.status("/act/one/stop", **own) == 403
        assert page.status("/act/..%2fone/stop", method="POST", **own) == 404
        assert page.status("/act/one/shell", method="POST", **own) == 404
        assert page.status("/act/one/stop", method="POST", **own) == 409
