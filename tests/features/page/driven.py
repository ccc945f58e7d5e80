"""A page's process and a browser that is driven, for the tests of this folder. Skipped where one of them is missing."""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

import pytest

from tests import processes
from tests.scenarios.harness import ROOT

# Where continuous integration has put what the environment lacks. What is in both is the environment's here.
PACKAGES = os.environ.get("BROWSER_TESTS_PACKAGES", "")
if PACKAGES and PACKAGES not in sys.path:
    sys.path.append(PACKAGES)
IMPORTS = os.pathsep.join(filter(None, (str(ROOT), PACKAGES)))  # of processes that are started

if importlib.util.find_spec("nicegui") is None:  # which the page's process imports
    pytest.skip("needs the extra page: pip install '.[page]'", allow_module_level=True)
webdriver = pytest.importorskip(
    "selenium.webdriver", reason="needs what drives the browser: pip install selenium"
)
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402 - as above

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver",
                allow_module_level=True)  # fmt: skip

poll = functools.partial(processes.poll, every_s=0.1)  # each look takes time from the browser
OPENS_WITHIN_S = 10.0
# One test process has them all, and one browser; one of them needs the huge metrics.
one_browser = pytest.mark.xdist_group("huge metrics")
VIEWS = ("training", "timeline", "ranks", "checkpoints", "settings")
_POINTS = """
const plot = document.querySelector('.ddp-curves');
const shown = (plot && plot.data || []).find(one => one.name === arguments[0]);
return shown ? shown.x.length : 0;
"""
# Whether the shown panel has had its content for three looks: what is drawn late moves what is below.
_IS_STILL = """
const panel = document.querySelector('.q-tab-panel');
const plot = panel && panel.querySelector('.js-plotly-plot');
const now = panel ? panel.innerText.length + ' ' + panel.scrollHeight + ' ' + Boolean(plot && plot.data) : '';
window.looks = now === window.seen ? (window.looks || 0) + 1 : 0;
window.seen = now;
return now !== '' && window.looks >= 3;
"""
_TEXT = "return document.body.innerText"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def status_of(address, *, method="GET", headers=None):
    """The status of an answer; 0 where there is none. A port that nobody has may be given to who asks for it."""
    request = urllib.request.Request(address, headers=headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return 0


def wait_until_served(base):
    poll(lambda: status_of(f"{base}/") != 0, timeout_s=120, what="the page")


class Page:
    """The page's process over a folder."""

    def __init__(self, folder, *words, cwd=None, variables=None):
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddp_runner", "page", "-l", folder, "--port", str(self.port), *words],
            env={**os.environ, "PYTHONPATH": IMPORTS, **(variables or {})},
            stdout=subprocess.PIPE,
            cwd=cwd,
            text=True,
        )  # fmt: skip
        printed = [self.process.stdout.readline() for _ in range(2)]
        self.token = re.search(r"token=(\S+)", printed[1])[1]
        wait_until_served(self.base)

    def status(self, path, *, method="GET", **headers):
        """The status of an answer to that path."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return status_of(self.base + path, method=method, headers=named)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(15)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@functools.cache
def _driver():
    """Start the browser of this test process, as its start takes longer than most looks; it ends with the process."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    service = webdriver.ChromeService(DRIVER, env={**os.environ, "TMPDIR": folder.name})
    driver = webdriver.Chrome(options=options, service=service)
    driver.implicitly_wait(5)  # a panel is drawn when its tab is opened

    def end():
        driver.quit()
        folder.cleanup()

    atexit.register(end)
    return driver


@contextlib.contextmanager
def browser(width, *, height=1100, dark=False):
    """The browser with a page of that size; what pages before it have kept and said is gone."""
    driver = _driver()
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    driver.get_log("browser")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    try:
        yield driver
    finally:
        driver.get("about:blank")


def busy_factor():
    """How many times as long as alone things take, by how many wait for a core now; 1 on an idle machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def click_tab(driver, name):
    tabs = driver.find_elements("css selector", ".q-tab")
    driver.execute_script(
        "arguments[0].click()",
        next(one for one in tabs if one.get_attribute("textContent") == name),
    )


def shows(driver, text, *, within_s=OPENS_WITHIN_S):
    poll(
        lambda: text in driver.execute_script(_TEXT),
        timeout_s=within_s,
        what=f"{text!r} on the page",
    )


def click_button(driver, text, *, within=None):
    """The button of that text, which may be in a dialog that is just opening."""
    place = within or driver
    poll(lambda: _clicked(place, text), timeout_s=OPENS_WITHIN_S, what=f"the button {text!r}")


def _clicked(place, text):
    found = [one for one in place.find_elements("tag name", "button") if one.text == text]
    if not found or not found[0].is_displayed():
        return False
    found[0].click()
    return True


def clicked(driver, selector):
    """Whether it could be clicked: a page that is drawn again meanwhile has another one."""
    with contextlib.suppress(StaleElementReferenceException):
        driver.find_element("css selector", selector).click()
        return True
    return False


def points(driver, name):
    """How many points that trace of the curves has."""
    return driver.execute_script(_POINTS, name)


def pictures(driver, folder, width, *, views=VIEWS):
    """A picture of each view, once it has been drawn; nothing may be wider than the window."""
    for view in views:
        click_tab(driver, view)
        poll(lambda: driver.execute_script(_IS_STILL), timeout_s=OPENS_WITHIN_S, what="still view")
        widths = driver.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert widths[0] <= widths[1], f"{view} at {width}"
        driver.save_screenshot(str(folder / f"{view}_{width}.png"))
