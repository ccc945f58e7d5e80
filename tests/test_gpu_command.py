"""``python -m tests.gpu``: one process a part, each with its limit, facts at once, whatever else goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from tests.gpu.__main__ import PARTS, TOTAL_S, errors_in
from tests.gpu.driver import NO_DEVICE, why_no_device
from tests.processes import poll

ROOT = Path(__file__).resolve().parents[1]
REPORTS = """
NEEDS_GPU = False
def measure(facts):
    facts.note("here", True)
"""
HANGS = """
import os, subprocess, sys, time
NEEDS_GPU = False
def measure(facts):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    facts.note("pids", [os.getpid(), child.pid])
    time.sleep(600)
"""
DIES = """
import os, signal
NEEDS_GPU = False
def measure(facts):
    facts.note("before", 1.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""
STUMBLES = """
import os, signal
NEEDS_GPU = False
def wrong():
    raise KeyError("no such thing")
def dies(facts):
    facts.note("begun", 1)
    os.kill(os.getpid(), signal.SIGKILL)
def hangs(facts):
    signal.pause()
def measure(facts):
    facts.measure("raised", wrong)
    facts.forked("died", dies, limit_s=5)
    facts.forked("hung", hangs, limit_s=0.2)
    facts.measure("after", lambda: 7)
"""


def _command(folder, *words, environment=None):
    return [sys.executable, "-m", "tests.gpu", "--out", folder, *words], {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder.parent),  # what a command leaves there that is killed
        **(environment or {}),
    }


def _run(folder, *words, environment=None):
    command, env = _command(folder, *words, environment=environment)
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    known = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return done, known


def _parts(folder, **sources):
    """Parts of the test's own: the words that choose them, and where they are found."""
    for name, source in sources.items():
        (folder / f"{name}_part.py").write_text(source, encoding="utf-8")
    return {"PYTHONPATH": f"{ROOT}:{folder}"}


@pytest.mark.skipif(not why_no_device(), reason="there is a GPU")
def test_without_a_gpu_each_part_says_so_and_nothing_has_failed(tmp_path):
    """The dry run: as long as no GPU is there, that is all that can be seen of the command."""
    done, known = _run(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(known) == [part.name for part in PARTS]
    for name, part in known.items():
        assert (part["outcome"], part["facts"]) == ("skipped", {}), name
        assert part["why"].startswith(NO_DEVICE)
    *_, last = done.stdout.splitlines()
    assert last.startswith(f"nothing was measured: {NO_DEVICE}")
    assert done.stderr == ""


def test_the_parts_together_end_before_the_machine_is_taken_back():
    """Nine minutes, whatever hangs."""
    assert sum(part.limit_s for part in PARTS) <= TOTAL_S < 540


def test_a_part_that_hangs_is_killed_and_the_others_still_run(tmp_path):
    """With all that it has started."""
    environment = _parts(tmp_path, hangs=HANGS, reports=REPORTS)
    only = "first=hangs_part:2,second=reports_part:20"
    done, known = _run(tmp_path / "out", "--only", only, environment=environment)
    assert known["first"]["outcome"] == "timeout", done.stdout
    assert "killed at its limit of 2 s" in known["first"]["why"]
    assert 2.0 <= known["first"]["seconds"] < 20.0
    assert (known["second"]["outcome"], known["second"]["facts"]) == ("ok", {"here": True})
    assert done.returncode == 1
    assert "not whole: first" in done.stdout.splitlines()[-1]
    pids = known["first"]["facts"]["pids"]
    assert len(pids) == 2
    for pid in pids:
        poll(lambda pid=pid: not _lives(pid), timeout_s=10.0, what=f"end of {pid}")


def test_a_part_that_crashes_is_reported_and_what_it_knew_is_kept(tmp_path):
    """By SIGKILL, as the kernel ends one for lack of memory."""
    environment = _parts(tmp_path, dies=DIES, reports=REPORTS)
    only = "first=dies_part:20,second=reports_part:20"
    done, known = _run(tmp_path / "out", "--only", only, environment=environment)
    first = known["first"]
    assert (first["outcome"], first["why"]) == ("failed", "killed by SIGKILL"), done.stdout
    assert first["facts"] == {"before": 1.5}
    assert known["second"]["outcome"] == "ok"
    assert done.returncode == 1


def test_a_measurement_that_fails_stops_no_other_one(tmp_path):
    """One that raises, one that dies and one that hangs: each is reported where its fact would be."""
    environment = _parts(tmp_path, stumbles=STUMBLES)
    done, known = _run(tmp_path / "out", "--only", "all=stumbles_part:60", environment=environment)
    assert known["all"]["outcome"] == "ok", done.stdout
    facts = known["all"]["facts"]
    assert facts["raised"] == {"error": "KeyError: 'no such thing'"}
    assert facts["died"] == {"begun": 1, "ended": "by signal SIGKILL"}
    assert facts["hung"]["ended"].startswith("killed: still there after")
    assert facts["after"] == 7
    assert errors_in(facts) == ["raised", "died", "hung"]
    assert "3 errors: raised, died, hung" in done.stdout
    assert "3 measurements failed" in done.stdout.splitlines()[-1]


def test_facts_are_there_while_a_part_runs_until_the_command_ends(tmp_path):
    """A machine that is taken back leaves what was known until then, and no process."""
    environment = _parts(tmp_path, hangs=HANGS)
    command, env = _command(
        tmp_path / "out", "--only", "one=hangs_part:60", environment=environment
    )
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL) as process:
        try:
            pids = poll(lambda: _pids(tmp_path / "out" / "facts.json"), what="its facts")
        finally:
            process.kill()
    poll(lambda: not _lives(pids[0]), timeout_s=10.0, what="end of the part")
    os.kill(pids[1], signal.SIGKILL)  # a stranger's process, which nobody has tied to its parent


def test_a_rehearsal_measures_on_the_cpu_what_is_measured_on_a_gpu(tmp_path):
    """The same code with a stand-in for NCCL: ranks sum, and the abort of one ends another's sum wrongly."""
    done, known = _run(tmp_path / "out", "--only", "two_ranks", "--rehearse")
    part = known["two_ranks"]
    assert (part["outcome"], errors_in(part["facts"])) == ("ok", []), done.stdout
    assert part["facts"]["plain"]["rank1"]["sum"] == 3.0
    assert part["facts"]["partial_abort"]["rank1"]["is_wrong_and_whole"] is True
    assert "came to its end" in done.stdout.splitlines()[-1]


def test_wheels_are_found_by_the_parts(tmp_path):
    """What a machine without network lacks comes along."""
    with zipfile.ZipFile(tmp_path / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought_along.py", "WORD = 'brought'\n")
    source = REPORTS + "    import brought_along\n    facts.note('word', brought_along.WORD)\n"
    environment = _parts(tmp_path, reports=source)
    words = ("--only", "one=reports_part:20", "--wheels", tmp_path)
    done, known = _run(tmp_path / "out", *words, environment=environment)
    assert known["one"]["facts"] == {"here": True, "word": "brought"}, done.stdout
    assert "wheels: brought-1-py3-none-any.whl" in done.stdout


def test_the_command_and_its_parts_import_no_torch():
    """Importing them must not begin anything on a device, and costs nothing."""
    modules = ["tests.gpu.__main__", *(part.module for part in PARTS)]
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]"
    code += "; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _pids(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))["one"]["facts"]["pids"]
    except (OSError, KeyError, ValueError):
        time.sleep(0.01)
        return None
