"""The script where a shell has little to offer, and keys that are pressed too early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ready
from tests.scenarios.harness import ROOT, Run, poll

SCRIPT = str(ROOT / "launch_training.sh")
CHECKOUT = {"DDP_RUNNER_PYTHON": sys.executable}
SHORT = ("-b", "8", "--max-steps", "4", "num_workers=1", "optim.warmup_steps=2", "--audit")


def in_shell(words: str) -> tuple[str, ...]:
    """A command that a shell starts behind ``words``."""
    return ("sh", "-c", f'{words} exec "$0" "$@"', SCRIPT, "train")


def test_a_run_without_standard_streams_trains(tmp_path):
    """What is printed goes nowhere, and into no file that was opened since. With as few open files as suffice."""
    command = ("sh", "-c", 'ulimit -n 96; exec "$0" "$@" <&- >&- 2>&-', SCRIPT, "train")
    with Run(tmp_path, *SHORT, command=command, environment=CHECKOUT) as run:
        assert run.wait() == 0
    assert run.console == ""
    assert run.summary()["steps"] == 4
    assert "completed" not in (run.logs / "events.jsonl").read_text().splitlines()[0]


def test_too_few_open_files_are_one_line(tmp_path):
    """It is known before any process starts, and what would be enough, see above, is said."""
    command = in_shell("ulimit -n 20;")
    forks = {**CHECKOUT, **ready.environment()}
    with Run(tmp_path, *SHORT, command=command, environment=forks) as run:
        assert run.wait() == 2
    expected = "ddp_runner: error: ulimit -n=20: allows too few open files: 2 ranks need 96\n"
    assert run.console == expected
    assert not run.logs.exists()


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (1, "512 bytes; a run needs 65,536"),
        (200, "102,400 bytes; a checkpoint takes more than "),
    ],
    ids=["for any run", "for a checkpoint"],
)
def test_files_too_small_are_one_line(tmp_path, blocks, says):
    """No later try could write one, so nothing is trained."""
    command = in_shell(f"ulimit -f {blocks};")
    forks = {**CHECKOUT, **ready.environment()}
    forks["PYTHONDONTWRITEBYTECODE"] = "1"  # Python would leave half a file
    wide = (*SHORT, "task.width=16384")
    with Run(tmp_path, *wide, command=command, environment=forks) as run:
        assert run.wait() == 2, run.console
    assert f"ddp_runner: error: ulimit -f: allows files of {says}" in run.console
    assert "Traceback" not in run.console


def test_an_import_that_ends_its_process_is_named_with_its_code(tmp_path):
    """It says nothing itself; the exit code leads to the call of ``os._exit``."""
    (tmp_path / "mine.py").write_text("import os\nos._exit(3)\n")
    with Run(tmp_path, "--task", "mine.py", task=None) as run:
        assert run.wait() == 1
    said = "ERROR: the process that imports torch ended with exit code 3: it wrote nothing; "
    assert said in run.console, run.console


def test_sigquit_to_the_script_alone_ends_the_run(tmp_path):
    """Also where a shell that started it in the background has it ignore the signal."""
    settings = ("-b", "8", "--max-steps", "5000", "num_workers=1", "--audit")
    command = in_shell("trap '' QUIT;")
    forks = {**CHECKOUT, **ready.environment()}
    with Run(tmp_path, *settings, command=command, environment=forks) as run:
        run.wait_for_step(3)
        run.signal(signal.SIGQUIT)
        assert run.wait() == 1, run.console
    assert "SIGQUIT: ended at once" in run.console
    assert run.summary()["status"] == "failed"


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005, 0.1, 0.4, 1.2])
def test_a_ctrl_c_in_the_first_moments_is_one_line(tmp_path, after_s):
    """Whoever of shell, Python and supervisor is at it; there is nothing to save yet.

    Where the shell becomes `env`, which holds signals back, nobody is there to answer for a moment: the kernel ends it.
    """
    process = subprocess.Popen(
        [SCRIPT, "--task", "synthetic", "--cpu", "-n", "2"],
        cwd=tmp_path,
        env={**os.environ, **CHECKOUT},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        poll(lambda: answers_interrupts(process.pid), what="an answer to Ctrl-C")
        time.sleep(after_s)  # whatever it has come to by then
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert not list(tmp_path.iterdir())
    if after_s < 0.1 and process.returncode == -signal.SIGINT:
        assert said == ""
        return
    lines = [line for line in said.splitlines() if "so far" not in line]
    assert process.returncode == 130, said
    assert len(lines) == 1, said
    assert "interrupted" in lines[0]


def answers_interrupts(pid: int) -> bool:
    """Whether the process holds interrupts back, or has a handler for them."""
    fields = dict(
        line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    bit = 1 << (signal.SIGINT - 1)
    return any(int(fields[name], 16) & bit for name in ("SigBlk", "SigCgt"))
