"""Torch is imported from the first moment of a launch on; nothing of that stays where it is in vain."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from ddp_runner.cli import preimport
from ddp_runner.core.launch_plan import TRAINED
from ddp_runner.kernel.processes.zygote_start import ZygoteAhead
from ddp_runner.kernel.system.parent_death import MARK_VARIABLE
from ddp_runner.start import ZYGOTE_AHEAD
from ddp_runner.system.environment import training_environment
from tests.processes import poll
from tests.scenarios.harness import TRAIN, Run
from tests.scenarios.leftovers import processes_with

AHEAD = f"{ZYGOTE_AHEAD}{TRAINED}:"


def zygotes_ahead(pid):
    """The processes that this one has started ahead."""
    try:
        return [one for one in psutil.Process(pid).children() if AHEAD in one.cmdline()]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def started(tmp_path):
    """``started(*words)``: the command, the variable that all its processes have, and what it printed."""
    running = []

    def start(*words):
        name = f"AHEAD_{len(running)}_{os.getpid()}"
        output = tmp_path / name
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*TRAIN, *words],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, name: "1", "PYTHONPATH": str(Path(__file__).parents[2])},
            )
        running.append(process)
        return process, f"{name}=1", output

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_wrong_settings_leave_no_process(started):
    """One line and exit 2 as ever, and at its return the import that was begun is gone."""
    process, variable, output = started("--cpu", "-n", "2", "max_steps=-3")
    poll(lambda: zygotes_ahead(process.pid), what="the import")
    assert process.wait(60) == 2
    assert not processes_with(variable)
    expected = "ddp_runner: error: max_steps=-3: must be a whole number, 0 or more"
    assert output.read_text().startswith(expected)
    assert len(output.read_text().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launch_ended_while_it_is_judged_leaves_nothing(started, number):
    """By Ctrl-C with one line; by nobody's leave with none.

    A Ctrl-C amid a class that is made of text, as dataclasses are, has CPython end itself by that signal at last.
    """
    process, variable, output = started("--cpu", "-n", "2", "--max-steps", "3")
    poll(lambda: zygotes_ahead(process.pid), what="the import")
    os.killpg(process.pid, number)
    assert process.wait(60) in ((130, -number) if number == signal.SIGINT else (-number,))
    poll(lambda: not processes_with(variable), timeout_s=10.0, what="the end of all")
    said = "ddp_runner: interrupted\n" if number == signal.SIGINT else ""
    assert output.read_text() == said


def test_a_run_takes_the_process_that_has_imported_meanwhile(tmp_path):
    """It is the run's zygote from then on, and nobody has to import torch again."""
    with Run(tmp_path, "--max-steps", 10**6, "num_workers=0", world=1, command=TRAIN) as run:
        zygote = run.named("ddp:zygote")
        assert AHEAD in psutil.Process(zygote.pid).cmdline()
        run.wait_for_event("world_formed")
        marks = psutil.Process(zygote.pid).environ()[MARK_VARIABLE]
        assert marks == psutil.Process(run.named("ddp:store").pid).environ()[MARK_VARIABLE] != ""
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    assert len(run.events("zygote_ready")) == 1


def test_a_zygote_that_was_started_for_other_settings_is_replaced():
    """The variables are read when torch is imported: what has others is ended at once.

    What this process may do with open files, which is settled later, holds for one that is taken.
    """
    own = {"PATH": os.environ["PATH"]}
    for threads, is_taken in ((2, True), (3, False)):
        zygote = ZygoteAhead(f"{TRAINED}:", training_environment(own, threads=2))
        # A process that has just been started has no command line for a moment.
        (pid,) = [one.pid for one in poll(lambda: zygotes_ahead(os.getpid()), what="its start")]
        ours = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (200, ours[1]))
        needed = training_environment(own, threads=threads)
        taken = zygote.take({**needed, MARK_VARIABLE: zygote.mark})
        assert (taken is not None) == is_taken
        assert psutil.pid_exists(pid) == is_taken
        assert zygote.take({}) is None, "it can be had once"
        zygote.end()
        if taken is not None:
            assert taken.process.poll() is None, "it is no longer its to end"
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == ours
            taken.process.kill()
            taken.process.wait()
            taken.connection.close()
            os.close(taken.output)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--help"], {}),
        (["-n", "2", "-h"], {}),
        (["--version"], {}),
        (["--dry-run", "--cpu"], {}),
        (["--find-batch-size"], {}),
        (["--nnodes=2"], {}),
        (["--cpu"], {"LOCAL_RANK": "0"}),
        (["--cpu"], {"NNODES": "2"}),
    ],
)
def test_without_a_training_here_nothing_is_started(words, variables):
    """Help stays fast, and whoever is a rank of another launcher imports torch itself."""
    assert preimport.start(words, variables) is None


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        ([], 4),
        (["-n", "4"], 2),
        (["--nproc-per-node=8"], 1),
        (["--nproc", "1"], 8),
        (["run.nproc_per_node=2", "-n", "4"], 2),
        (["-n", "auto"], 4),
        (["threads_per_rank=3", "-n", "8"], 3),
        (["-n", "16"], 1),
    ],
)
def test_threads_are_guessed_as_a_run_will_have_them(monkeypatch, words, threads):
    """Of eight cores, without a GPU; a wrong guess costs an import, and nothing else."""
    monkeypatch.setattr(preimport, "core_count", lambda: 8)
    given = []
    monkeypatch.setattr(preimport, "ZygoteAhead", lambda _, own: given.append(own))
    preimport.start([*words, "--cpu"], {})
    assert given[0]["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        ((), "4"),
        (("-n",), "4"),
        (("-n", "4"), "2"),
        (("-n", "2", "nproc_per_node=8"), "1"),
        (("--threads-per-rank", "3"), "3"),
    ],
)
def test_the_words_say_how_many_threads_a_rank_has(words, threads, monkeypatch):
    """Also where there are none, or the last one lacks its value; what is wrong is found later."""
    made = []
    monkeypatch.setattr(preimport, "core_count", lambda: 8)
    monkeypatch.setattr(preimport, "ZygoteAhead", lambda _, own: made.append(own))
    monkeypatch.setattr(preimport, "_DRIVERS", ())
    preimport.start(words, {})
    assert [one["OMP_NUM_THREADS"] for one in made] == [threads]
    preimport.start(words, {"OMP_NUM_THREADS": "7"})
    assert made[1]["OMP_NUM_THREADS"] in {"7", "3"}
