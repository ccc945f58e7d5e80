"""``run`` by the names that torchrun has: programs that are no Python, and what the console shows."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests import ready

from .harness import poll
from .test_scripts import TRAIN, run_script

WORKER = """
echo "rank $RANK of $WORLD_SIZE, attempt $TORCHELASTIC_RESTART_COUNT: $*"
grep SigIgn /proc/self/status
echo "open: $(ls -l /proc/$$/fd | grep -c -e socket: -e memfd:)"
if [ "$RANK$TORCHELASTIC_RESTART_COUNT" = 10 ]; then kill -9 $$; fi
"""


TORCHRUNS = (
    *("--nproc-per-node", "cpu", "--nnodes=1", "--rdzv-backend", "c10d", "--rdzv-id", "job7"),
    *("--rdzv-endpoint", "localhost:0", "--rdzv_conf", "timeout=9", "--local_addr=127.0.0.1"),
    *("-r", 3, "--start-method", "spawn", "--standalone", "--monitor-interval", 1),
)


def test_torchrun_s_words_for_one_machine_and_its_variables_are_taken(tmp_path):
    """Options that say what is so in any case, those that a script sees, and PET_* where no option says it."""
    script = tmp_path / "own.py"
    script.write_text(
        "import os; print(*(os.environ[name] for name in ('ROLE_NAME', 'TORCHELASTIC_RUN_ID',"
        " 'WORLD_SIZE', 'TORCHELASTIC_MAX_RESTARTS')))\n",
        encoding="utf-8",
    )
    variables = {"PET_ROLE": "trainer", "PET_NPROC_PER_NODE": "7", "PET_MAX_RESTARTS": "4"}
    with run_script(tmp_path, script, world=None, options=TORCHRUNS, variables=variables) as run:
        assert run.wait() == 0, run.console
    assert f"trainer job7 {os.cpu_count()} 4" in run.console


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / "worker.sh"
    script.write_text(WORKER, encoding="utf-8")
    return script


def log_of(run, attempt, rank):
    return (run.logs / f"attempt_{attempt}" / f"rank_{rank}.log").read_text()


def test_a_killed_program_starts_again_as_it_is(tmp_path, worker):
    """With its words and variables, and nothing else of ours: no signal ignored, no channel open."""
    options = ("--no_python", "--max_restarts", 1)
    with run_script(tmp_path, "--", "bash", worker, "a b", "--c", options=options) as run:
        assert run.wait() == 0, run.console
    assert "rank 1 killed (SIGKILL) -> all 2 ranks start again" in run.console
    assert "optimizer step" not in run.console
    for rank in range(2):
        said = log_of(run, 1, rank)
        assert f"rank {rank} of 2, attempt 1: a b --c" in said
        assert "SigIgn:\t0000000000000000" in said
        assert "open: 0" in said


def test_a_python_of_its_own_trains_as_well(tmp_path):
    """torchrun's way: ``python train.py``, which no zygote has forked."""
    words = (sys.executable, TRAIN, "--epochs", 1)
    forks = {"environment": ready.environment(programs=True)}
    with run_script(tmp_path, *words, options=("--no-python",), **forks) as run:
        assert run.wait() == 0, run.console
    assert (tmp_path / "final.pt").exists()


def test_a_program_is_asked_to_stop_and_ends_with_its_own_code(tmp_path):
    """SIGTERM reaches it; a code of its own is the run's."""
    script = tmp_path / "worker.sh"
    script.write_text(
        "trap 'touch asked_$RANK; exit 0' TERM; touch up_$RANK\n"
        'if [ "$1" = fail ]; then exit $((RANK * 9)); fi\n'
        "while true; do sleep 0.1; done\n",
        encoding="utf-8",
    )
    with run_script(tmp_path, "bash", script, options=("--no-python",)) as run:
        poll(lambda: len(list(tmp_path.glob("up_*"))) == 2, what="both ranks")
        run.signal(signal.SIGTERM)
        assert run.wait() == 143, run.console
    assert len(list(tmp_path.glob("asked_*"))) == 2
    with run_script(tmp_path, "bash", script, "fail", options=("--no-python",)) as run:
        assert run.wait() == 9, run.console


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("-t", "1:3,2:1"), ["[default1]:I am 1", "[default2]:I am 2"]),
        (("--local-ranks-filter", "1,2"), ["I am 1", "I am 2"]),
        (("--tee=3", "--local_ranks_filter=2"), ["[default2]:I am 2"]),
    ],
    ids=["some", "only", "all, but only"],
)
def test_the_console_shows_the_ranks_that_are_asked_for(tmp_path, options, shown):
    """By torchrun's names, and marked as there; each has its log in any case."""
    script = tmp_path / "own.py"
    script.write_text("import os; print('I am', os.environ['RANK'])\n", encoding="utf-8")
    with run_script(tmp_path, script, world=3, options=options) as run:
        assert run.wait() == 0, run.console
    assert sorted(line for line in run.console.splitlines() if "I am" in line) == shown
    assert all(log_of(run, 0, rank) == f"I am {rank}\n" for rank in range(3))
    assert "no rank has made an optimizer step" in run.console
