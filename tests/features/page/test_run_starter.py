"""A run from a form: which words it is, what is refused before and by it. Needs nothing of the extra."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time

import pytest

from ddp_runner.config.fields import known_fields
from ddp_runner.features.page.run_starter import SETTINGS, RunStarter
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.proc_state import stat_fields
from ddp_runner.system.run_directories import LOG_LOCK_NAME
from ddp_runner.system.run_holder import signal_below_holder


def test_a_form_is_a_command_line(tmp_path, monkeypatch):
    """Of what was filled in; the folder is named where it is not the usual one."""
    monkeypatch.chdir(tmp_path)
    for name in ("logs", "a b"):
        (tmp_path / name).mkdir()
    values = {"run.task": "synthetic", "data.batch_size": " 8 ", "run.name": "", "data.path": "a b"}
    starter = RunStarter(tmp_path / "logs")
    words = starter.words(values)
    assert words == ["train", "run.task=synthetic", "data.batch_size=8", "data.path=a b"]
    assert starter.shown(words).endswith(
        "train run.task=synthetic data.batch_size=8 'data.path=a b'"
    )
    elsewhere = RunStarter(tmp_path / "other").words(values)
    assert elsewhere[1] == f"--log-dir={tmp_path / 'other' / 'synthetic'}"
    assert set(SETTINGS) < set(known_fields())
    assert "run.log_dir" not in SETTINGS


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data.batch_size": "-1"}, "data.batch_size=-1: must be a whole number"),
        ({"run.log_dir": "/tmp/x"}, "cannot be set here"),
        ({"--inject": "kill"}, "cannot be set here"),
        ({"run.name": "../x"}, "must be letters"),
        ({"run.name": "x\0"}, "no text"),
        ({"data.path": "x" * 20_000}, "too long"),
        ({"optim.min_learning_rate": "5"}, "optim.min_learning_rate"),
    ],
)
def test_what_is_wrong_is_found_before_anything_starts(tmp_path, values, said):
    """In the words of the command line."""
    with pytest.raises(BadInputError, match=re.escape(said)):
        RunStarter(tmp_path).words(values)
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_refuses_is_said_on_the_page(tmp_path, monkeypatch):
    """The last lines that it has printed; nothing is left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    starter = RunStarter(tmp_path / "logs")
    with pytest.raises(BadInputError, match="gpus"):
        asyncio.run(starter.start({"run.gpus": "99"}))
    assert list((tmp_path / "logs").iterdir()) == []


_HOLDER = """
import fcntl, subprocess, sys, time
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
print(child.pid, int(child.stdout.readline()), flush=True)
time.sleep(60)
"""


def _is_gone(pid):
    fields = stat_fields(pid)
    return not fields or fields[0] == "Z"


def test_only_what_is_below_the_holder_is_injected_into(tmp_path):
    """Its child and what that has started: a pid of anybody else in a status file is not touched."""
    other = subprocess.Popen(["sleep", "60"])
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, tmp_path / LOG_LOCK_NAME], stdout=subprocess.PIPE
    )
    try:
        child, grandchild = map(int, holder.stdout.readline().split())
        for pid in (other.pid, holder.pid, 0, 1, -1):
            assert not signal_below_holder(tmp_path, holder.pid, pid, signal.SIGKILL)
        for wrong in (other.pid, 0, 1):
            assert not signal_below_holder(tmp_path, wrong, child, signal.SIGKILL)
        assert other.poll() is None
        for pid in (grandchild, child):
            assert signal_below_holder(tmp_path, holder.pid, pid, signal.SIGKILL)
            deadline_s = time.monotonic() + 10
            while not _is_gone(pid) and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert _is_gone(pid)
    finally:
        for process in (other, holder):
            process.kill()
            process.wait()
        holder.stdout.close()
