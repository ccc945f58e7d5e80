"""The live page in a real browser, beside a real run of which ranks are killed. Skipped where one of them is missing."""

from __future__ import annotations

import functools
import json
import math
import re
import signal
import time

import psutil
import pytest

from tests.features.page.driven import (
    IMPORTS,
    OPENS_WITHIN_S,
    Page,
    browser,
    busy_factor,
    click_button,
    click_tab,
    clicked,
    free_port,
    one_browser,
    pictures,
    points,
    poll,
    shows,
)
from tests.scenarios.harness import Run

pytestmark = [
    one_browser,
    pytest.mark.whole_run,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SEEN_WITHIN_S = 2.0
EVIL = "<script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
LINK = re.compile(r"page: (http://127\.0\.0\.1:\d+)/run/~\?token=(\S+)")


def seconds_until_seen(driver, run, kills):
    """Kill rank 1, for the ``kills``th time, and wait for the mark and the row."""
    run.signal(signal.SIGKILL, run.rank_pid(1))
    killed_s = time.monotonic()
    wait_for_kills(driver, kills)
    return time.monotonic() - killed_s


def wait_for_kills(driver, kills):
    rows = functools.partial(driver.find_elements, "css selector", ".ddp-fault")
    poll(
        lambda: points(driver, "fault") == kills and len(rows()) == kills,
        timeout_s=OPENS_WITHIN_S,
        what="the mark and the row",
    )


def watch_beside(run, base, token):
    """The page that the run has started: a kill is seen in time, another is asked for; how many there were."""
    with browser(1200) as driver:
        driver.get(f"{base}/run/~?token={token}")
        poll(lambda: points(driver, "loss"), timeout_s=OPENS_WITHIN_S, what="the curve")
        assert token not in driver.current_url
        assert points(driver, "fault") == 0
        shows(driver, "Faults: none")
        kills, seen_s = 0, math.inf
        while seen_s > SEEN_WITHIN_S * busy_factor():  # others may have every core for a moment
            assert kills < 3, f"mark and row came after {seen_s:.1f} s"
            kills += 1
            seen_s = seconds_until_seen(driver, run, kills)
        poll(lambda: points(driver, "repair") == kills, timeout_s=30, what="the repair")
        victim = run.status()["ranks"][1]["pid"]
        click_button(driver, "inject")
        click_button(driver, "do it")
        wait_for_kills(driver, kills + 1)
        poll(lambda: run.status()["ranks"][1]["pid"] != victim, timeout_s=30, what="a new rank")
        return kills + 1


def cells(driver):
    return [one.text for one in driver.find_elements("css selector", ".q-table td")]


def end_the_page(run, token):
    """It may die: the run goes on, and says so; its token is in no file."""
    supervisor = psutil.Process(run.status()["pid"])
    (page,) = [one for one in supervisor.children() if one.name() == "ddp:page"]
    step = run.status()["step"]
    page.kill()
    poll(lambda: "the page has ended" in run.output_path.read_text(), timeout_s=20, what="its end")
    poll(lambda: run.status()["step"] > step + 3, timeout_s=30, what="the next steps")
    written = [path for path in run.folder.rglob("*") if path.is_file() and path != run.output_path]
    assert [path for path in written if token.encode() in path.read_bytes()] == []


def stop_from_the_page(driver, run, folder):
    """A log is text, every view is drawn, and the run stops as by Ctrl-C."""
    poll(lambda: clicked(driver, ".ddp-fault .q-item"), timeout_s=OPENS_WITHIN_S, what="a fault")
    shows(driver, "plan: replace rank 1")
    click_tab(driver, "ranks")
    driver.find_element("css selector", "input[aria-label='search']").send_keys("onerror")
    shows(driver, EVIL)
    assert driver.execute_script("return window.evil") is None
    assert driver.execute_script("return document.querySelector('.ddp-log script')") is None
    pictures(driver, folder, 1200)
    click_button(driver, "save now")
    click_tab(driver, "checkpoints")
    shows(driver, "complete", within_s=30)
    click_button(driver, "verify all")
    poll(lambda: "yes" in cells(driver), timeout_s=30, what="what its content is")
    steps = run.status()["step"]
    click_button(driver, "stop")
    shows(driver, "Stop after this step?")
    click_button(driver, "stop", within=driver.find_element("css selector", ".q-dialog"))
    assert run.wait() == 130
    assert run.summary()["checkpoint_step"] >= steps
    shows(driver, "interrupted")


def test_a_killed_rank_is_seen_within_two_seconds(tmp_path):
    """As a mark and as a row, on a page that may die; a page of its own then shows the rest, and stops the run."""
    with Run(
        tmp_path / "run",
        *("max_steps=100000", "task.samples=100000", "task.pace_s=0.2", "audit=true"),
        *("log_interval=2", "recovery.max_restarts=100"),
        *("--page", "--page-can-inject", f"log.page_port={free_port()}"),
        environment={"PYTHONPATH": IMPORTS},
    ) as run:
        run.wait_for_step(10)
        with (run.logs / "rank_0.log").open("a") as log:
            log.write(f"{EVIL}\n")
        found = poll(lambda: LINK.search(run.output_path.read_text()), what="the link")
        kills = watch_beside(run, *found.groups())
        end_the_page(run, found[2])
        with Page(run.logs) as page:
            with browser(1200) as driver:
                driver.get(f"{page.base}/?token={page.token}")
                shows(driver, "running")
                driver.get(f"{page.base}/run/~")
                shows(driver, f"Faults: {kills}")
                shows(driver, "%")  # goodput
                stop_from_the_page(driver, run, tmp_path)
            with browser(400, dark=True) as narrow:
                narrow.get(f"{page.base}/run/~")
                shows(narrow, f"Faults: {kills}")
                pictures(narrow, tmp_path, 400)


def test_nothing_but_the_runs_is_served(tmp_path):
    """Over real requests, with the routes of the libraries in it."""
    (tmp_path / "logs" / "one").mkdir(parents=True)
    (tmp_path / "logs" / "one" / "status.json").write_text(
        json.dumps({"ranks": [{"rank": 0, "pid": 4}]})
    )
    (tmp_path / "secret.txt").write_text("secret")
    with Page(tmp_path / "logs", "--page-can-inject") as page:
        own = {"Origin": page.base, "Cookie": f"ddp_runner_page_{page.port}={page.token}"}
        assert page.status("/") == 200
        for path in ("/../secret.txt", "/run/../../secret.txt", "/..%2fsecret.txt", "/_nicegui/../../secret.txt",
                     "/_nicegui/auto/static/..%2f..%2f..%2fsecret.txt", "/docs", "/openapi.json"):  # fmt: skip
            assert page.status(path) == 404, path
        assert page.status("/", Host="rebound.example.org") == 403
        assert page.status("/", Origin="http://example.org") == 403
        assert page.status("/?token=wrong") == 403
        for action in ("one/stop", "one/inject?kind=kill&rank=0", "one/verify", "start"):
            path = f"/act/{action}"
            assert page.status(path, method="POST", **own | {"Cookie": ""}) == 403
            assert page.status(path, method="POST", **own | {"Origin": "http://x"}) == 403
            assert page.status(path, **own) == 403
        for action in ("..%2fone/stop", "one/shell", "one/inject?kind=raise&rank=0", "one/inject?kind=kill&rank=7"):  # fmt: skip
            assert page.status(f"/act/{action}", method="POST", **own) == 404
        for action in ("stop", "end", "inject?kind=kill&rank=0", "verify"):
            assert page.status(f"/act/one/{action}", method="POST", **own) == 409
        assert page.status("/act/start", method="POST", **own) == 400
