"""A page's process and a browser that is driven, for the tests of this folder. Skipped where one of them is missing."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests import processes
from tests.scenarios.harness import ROOT

pytest.importorskip("nicegui", reason="needs the extra page: pip install '.[page]'")
webdriver = pytest.importorskip(
    "selenium.webdriver", reason="needs what drives the browser: pip install selenium"
)
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver",
                allow_module_level=True)  # fmt: skip

poll = functools.partial(processes.poll, every_s=0.1)  # each look takes time from the browser
OPENS_WITHIN_S = 10.0
_TEXT = "return document.body.innerText"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Page:
    """The page's process over a folder."""

    def __init__(self, folder, *words):
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddp_runner", "page", "-l", folder, "--port", str(self.port), *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        printed = [self.process.stdout.readline() for _ in range(2)]
        self.token = re.search(r"token=(\S+)", printed[1])[1]
        poll(lambda: self.status("/") != 0, timeout_s=60, what="the page")

    def status(self, path, *, method="GET", **headers):
        """The status of an answer, redirections not followed; 0 where there is none."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.base + path, headers=named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

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


@contextlib.contextmanager
def browser(width, *, height=1100, dark=False):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    if width < 500:  # no window is that narrow
        metrics = {"width": width, "height": height, "pixelRatio": 1.0}
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
    else:
        options.add_argument(f"--window-size={width},{height}")
    if dark:
        options.add_argument("--force-dark-mode")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.implicitly_wait(5)  # a panel is drawn when its tab is opened
        yield driver
    finally:
        driver.quit()


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
