"""Whose traceback is shown when a script fails on several ranks, and what ``@record`` adds to that."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests import ready

from .test_scripts import run_script

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
w = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([w], lr=0.1)
def main():
    dist.init_process_group("gloo")
    for step in range(9):
        (w * w).sum().backward()
        dist.all_reduce(w.grad)
        optimizer.step()
        if step == 3 and dist.get_rank() == 1:
            raise ValueError("row 17 is bad")
"""
LOST = "Connection closed by peer"
# At nearly one moment: how long the end of a rank takes, which gloo shows to the other, does not matter.
BOTH_RAISE = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", end="")
dist.init_process_group("gloo")
for step in range(4):
    w.sum().backward()
    optimizer.step()
if dist.get_rank() == 1:
    open("raising", "w").close()
    raise ValueError("row 17 is bad")
while not os.path.exists("raising"):
    time.sleep(0.002)
raise RuntimeError("[pair.cc:553] {LOST}")
"""


# Rank 1 leaves in the way that is asked for, and rank 0 loses its connection to it.
LEAVES = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
w = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([w], lr=0.1)
for step in range(9):
    if step == 4 and dist.get_rank() == 1:
        eval(sys.argv[1])
    (w * w).sum().backward(); dist.all_reduce(w.grad); optimizer.step()
"""


def own(folder, call):
    script = folder / "own.py"
    script.write_text(f"{SCRIPT}{call}\n", encoding="utf-8")
    return script


def logs(run):
    return [(run.logs / "attempt_0" / f"rank_{rank}.log").read_text() for rank in range(2)]


def test_one_traceback_is_shown_and_that_of_the_first(tmp_path):
    """Rank 0 says that it lost its peer: that traceback stands in its log only, and is no cause."""
    script = own(tmp_path, BOTH_RAISE)
    with run_script(tmp_path, script) as run:
        assert run.wait() == 1, run.console
    assert run.console.count("Traceback") == 1
    assert "ValueError: row 17 is bad" in run.console
    assert re.search(
        r"rank 1: ValueError: row 17 is bad \(own\.py:\d+\) after 4 optimizer steps", run.console
    )
    assert LOST not in run.console
    assert "begun" in run.console, "printed before, and written only when the script has failed"
    zero, one = logs(run)
    assert LOST in zero
    assert "ValueError: row 17 is bad" in one
    assert run.summary()["attempts"][0]["rank"] == 1


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("sys.exit('no more data')", 1, "rank 1 exited with code 1: no more data"),
        ("os._exit(5)", 5, "rank 1 exited with code 5"),
    ],
)
def test_who_leaves_is_named_and_not_who_lost_it(tmp_path, how, code, cause):
    """With the code or text of the rank that left, on the console and in summary.json; nobody's traceback is shown."""
    script = tmp_path / "own.py"
    script.write_text(LEAVES, encoding="utf-8")
    with run_script(tmp_path, script, how) as run:
        assert run.wait() == code, run.console
    assert f"{cause} after 4 optimizer steps" in run.console
    assert "Traceback" not in run.console
    attempt = run.summary()["attempts"][0]
    assert (attempt["rank"], attempt["cause"], attempt["exit_code"]) == (1, cause, code)


def test_what_a_rank_still_writes_at_its_end_is_not_cut_off(tmp_path):
    """A rank whose program has ended, or raised, gets no SIGTERM for the fault that it is; it has left by sys.exit(7).

    The other one raises once the interpreter has taken down its connection, before that process is gone.
    """
    script = tmp_path / "own.py"
    late = "import atexit, time; atexit.register(lambda: (time.sleep(0.4), print('last words')))\n"
    script.write_text(late + LEAVES, encoding="utf-8")
    whole = {ready.WHOLE_END: "1"}
    with run_script(tmp_path, script, "sys.exit(7)", variables=whole) as run:
        assert run.wait() == 7, run.console
    assert all("last words" in log for log in logs(run))


def test_an_exception_that_only_record_has_seen_is_the_cause(tmp_path):
    """The script itself ends with a code of its own, and says nothing."""
    quiet = "try: record(main)()\nexcept BaseException: os._exit(9)"
    with run_script(tmp_path, own(tmp_path, quiet), options=("--max-restarts", 1)) as run:
        assert run.wait() == 9, run.console
    first, second = run.summary()["attempts"]
    assert (first["rank"], first["cause"]) == (1, "ValueError: row 17 is bad")
    assert "in main" in first["detail"]
    assert second["cause"] == first["cause"]
    assert "the same error after as many steps again" in run.console


def test_of_a_program_the_recorded_error_says_more_than_its_exit_code(tmp_path):
    """Of two that end with 1, the one that lost its peer may be the first to do so."""
    script = own(tmp_path, "record(main)()")
    forks = {"environment": ready.environment(programs=True)}
    with run_script(tmp_path, sys.executable, script, options=("--no-python",), **forks) as run:
        assert run.wait() == 1, run.console
    attempt = run.summary()["attempts"][0]
    assert (attempt["rank"], attempt["cause"]) == (1, "ValueError: row 17 is bad")


@pytest.mark.parametrize("content", ["no JSON", json.dumps({"message": "old: form"})])
def test_an_error_file_of_another_form_or_launch_does_no_harm(tmp_path, content):
    """Those of an earlier launch in the same folder are removed; one by other means is read as it can be."""
    stale = tmp_path / "logs" / "attempt_0"
    stale.mkdir(parents=True)
    (stale / "rank_0_error.json").write_text(json.dumps({"message": "ValueError: stale"}))
    script = tmp_path / "own.py"
    script.write_text(
        "import os\n"
        f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({content!r})\n"
        "os._exit(7)\n",
        encoding="utf-8",
    )
    with run_script(tmp_path, script, world=1) as run:
        assert run.wait() == 7, run.console
    cause = "old: form" if "old" in content else "rank 0 exited with code 7"
    assert run.summary()["attempts"][0]["cause"] == cause


def test_a_second_launch_shows_nothing_of_the_first(tmp_path):
    """Its lines stand in the same logs, behind those."""
    script = tmp_path / "own.py"
    script.write_text("import sys; print('launch', sys.argv[1])\n", encoding="utf-8")
    for launch in (1, 2):
        with run_script(tmp_path, script, launch, world=1) as run:
            assert run.wait() == 0, run.console
        assert f"launch {launch}" in run.console
        assert f"launch {3 - launch}" not in run.console
