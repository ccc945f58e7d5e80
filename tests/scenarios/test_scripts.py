"""``run``: scripts as people have them, which know nothing of this runner, and what comes of them under harm."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.scenarios.conftest import filled_once
from tests.scenarios.harness import ROOT, Run, poll

SCRIPTS = Path(__file__).with_name("scripts")
TRAIN, PROBE = SCRIPTS / "train.py", SCRIPTS / "probe.py"


def run_script(folder, *words, world=2, options=(), **how):
    """``run`` in ``folder``, with its logs below."""
    words = ("-l", Path(folder) / "logs", *options, *words)
    return Run(folder, *words, world=world, task=None, verb="run", **how)


def weights(folder):
    return [value.tolist() for value in torch.load(Path(folder) / "final.pt").values()]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, worker_id):
    """``undisturbed(*words)``: the weights of the script when nothing happens to it."""

    def of(*words, **how):
        def make(folder):
            with run_script(folder, TRAIN, *words, **how) as run:
                assert run.wait() == 0, run.console

        return weights(
            filled_once(tmp_path_factory, worker_id, make, ("script", words, *how.items()))
        )

    return of


@pytest.fixture
def fault_free(undisturbed):
    """After all epochs."""
    return undisturbed()


@pytest.fixture
def one_epoch(undisturbed):
    """After one epoch of one rank: its loader workers import torch again."""
    return undisturbed("--epochs", 1, world=1)


def test_a_script_finds_what_python_and_torchrun_give_it(tmp_path):
    """Its own ``__main__``, words, folder and variables; it ends as python does, with its own code."""
    with run_script(tmp_path, PROBE, 5, "--flag=x") as run:
        assert run.wait() == 5, run.console
    found = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(found):
        assert one["argv"] == [str(PROBE), "5", "--flag=x"]
        assert (one["file"], one["name"], one["spec"]) == (str(PROBE), "__main__", True)
        assert one["main"] is True
        assert one["path0"] == str(SCRIPTS)
        assert one["env"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": one["env"]["TORCHELASTIC_RUN_ID"],
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": one["env"]["TORCHELASTIC_MAX_RESTARTS"],
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": one["env"]["TORCHELASTIC_ERROR_FILE"],
        }
        assert one["async_errors"] is None
        assert one["stdin"] == ""
        assert (tmp_path / f"atexit_{rank}").exists()
    assert run.summary()["attempts"][0]["exit_code"] == 5


OWN_FILES = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "3"
sys.path.append(os.path.join(os.path.dirname(__file__), "lib"))
import profile, secrets, tests
import torch, ddp_runner
assert (__name__, __spec__, sys.modules["__main__"].__dict__ is globals()) == ("__main__", None, True)
assert (sys.argv[1:], sys.path[0]) == (["5", "--flag=x"], os.path.dirname(os.path.abspath(__file__)))
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
assert (profile.WHO, secrets.WHO, tests.WHO) == ("mine", "mine", "mine")
assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "0"
torch.save([1], b"bytes.pt")
torch.save([2], "pipe")
w = torch.nn.Parameter(torch.ones(1)); w.sum().backward(); torch.optim.SGD([w]).step()
assert torch.get_num_threads() == 3
print("got", sys.stdin.read())
sys.exit(5)
"""


def test_files_input_and_pipes_are_as_under_python(tmp_path):
    """Its folder comes before what is imported already, what it appends before the checkout; rank 0 reads.

    As a person starts it: the interpreters have imported nothing, where the other tests have forks, see tests.ready.
    """
    for path in ("profile.py", "secrets.py", "lib/tests/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("WHO = 'mine'\n", encoding="utf-8")
    (tmp_path / "own.py").write_text(OWN_FILES, encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    reader = os.open(tmp_path / "pipe", os.O_RDWR)  # so that no writer waits
    done = subprocess.run(
        [ROOT / "launch_training.sh", "run", "-n", "1", "--cpu", "own.py", "5", "--flag=x"],
        cwd=tmp_path,
        env={**variables, "DDP_RUNNER_PYTHON": sys.executable},
        input="hello",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 5, done.stdout + done.stderr
    assert "got hello" in done.stdout
    assert "OMP_NUM_THREADS=3, set by the script, holds after its first" in done.stdout
    assert torch.load(tmp_path / "bytes.pt") == [1]
    assert torch.load(io.BytesIO(os.read(reader, 10_000))) == [2]
    os.close(reader)


def test_each_process_of_a_script_draws_its_own_random_numbers(tmp_path):
    """As under torchrun: each rank, each attempt and each launch has its own, of Python, NumPy and torch."""
    script = tmp_path / "own.py"
    script.write_text(
        "import os, random, numpy, torch\n"
        "drawn = random.random(), numpy.random.rand(), torch.rand(()).item()\n"
        "with open(f\"drawn_{os.environ['RANK']}\", 'a') as file: print(*drawn, file=file)\n"
        "w = torch.nn.Parameter(torch.ones(1)); w.sum().backward(); torch.optim.SGD([w]).step()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('once more')\n",
        encoding="utf-8",
    )
    for _ in range(2):
        with run_script(tmp_path, script, options=("--max-restarts", 1)) as run:
            assert run.wait() == 0, run.console
    written = [(tmp_path / f"drawn_{rank}").read_text() for rank in range(2)]
    lines = "".join(written).splitlines()
    assert len(lines) >= 6, "of one rank an attempt may end before it has drawn"
    for numbers in zip(*(line.split() for line in lines), strict=True):
        assert len(set(numbers)) == len(lines), numbers


# After each epoch but the last; and, in the last, once it has begun.
HARMS = (
    ("1_0", "import signal; os.kill(os.getpid(), signal.SIGKILL)"),
    ("0_1", "raise RuntimeError('the disk has gone')"),
    ("1_2", "os._exit(7)"),
    ("1_3_inside", "import signal; os.kill(os.getpid(), signal.SIGSTOP)"),
)


def test_all_start_again_from_the_script_s_own_checkpoint(tmp_path, fault_free):
    """Whichever rank is lost, and however; with the weights of a run without faults."""
    for place, harm in HARMS:
        (tmp_path / f"harm_{place}").write_text(harm, encoding="utf-8")
    with run_script(tmp_path, TRAIN, options=("--max-restarts", 4)) as run:
        assert run.wait() == 0, run.console
    assert weights(tmp_path) == fault_free
    *lost, last = run.summary()["attempts"]
    assert [(one["rank"], one["steps"]) for one in lost] == [(1, 16), (0, 16), (1, 16), (1, 1)]
    assert (last["cause"], last["exit_code"]) == ("", None)
    for attempt, epoch in ((1, 1), (2, 2), (3, 3), (4, 3)):
        log = (run.logs / f"attempt_{attempt}" / "rank_0.log").read_text()
        assert f"resumed at epoch {epoch}" in log
        assert f"all 2 ranks start again (attempt {attempt})" in run.console


def test_without_being_asked_nothing_is_started_again(tmp_path):
    """A script that does not resume would start fresh and overwrite its results."""
    (tmp_path / "harm_1_0").write_text("os._exit(7)", encoding="utf-8")
    with run_script(tmp_path, TRAIN) as run:
        assert run.wait() == 7, run.console
    assert "restarted only with --max-restarts" in run.console
    assert len(run.summary()["attempts"]) == 1


@pytest.mark.parametrize(
    ("code", "exit_code", "reason"),
    [
        (
            "import argparse; argparse.ArgumentParser().parse_args(['--no'])",
            2,
            "arguments are wrong",
        ),
        ("raise ValueError('too early')", 1, "before the first optimizer step"),
    ],
    ids=["wrong words", "no step"],
)
def test_what_would_fail_again_is_not_started_again(tmp_path, code, exit_code, reason):
    """However many restarts there may be."""
    script = tmp_path / "own.py"
    script.write_text(f"import os\n{code}\n", encoding="utf-8")
    with run_script(tmp_path, script, world=1, options=("--max-restarts", 3)) as run:
        assert run.wait() == exit_code, run.console
    assert reason in run.console
    log = (run.logs / "attempt_0" / "rank_0.log").read_text()
    assert "ddp_runner" not in log.replace(str(tmp_path), ""), "no frame of ours"


def test_a_module_that_attaches_is_named(tmp_path):
    """``run`` looks into the file that it is given: of one that calls such a module it sees nothing."""
    (tmp_path / "training.py").write_text("import ddp_runner\n\nrun = ddp_runner.attach()\n")
    script = tmp_path / "own.py"
    script.write_text("import training\n")
    with run_script(tmp_path, script, world=1) as run:
        assert run.wait() == 2, run.console
    assert "error: training.py:3: run saw no attach() in the file that it was given" in run.console


def test_the_same_error_after_as_many_steps_ends_the_run(tmp_path):
    """It is the script's; the second attempt has shown that."""
    script = tmp_path / "own.py"
    script.write_text(
        "import torch\n"
        "w = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer = torch.optim.SGD([w], lr=0.1)\n"
        "for step in range(9):\n"
        "    (w * w).sum().backward(); optimizer.step()\n"
        "    if step == 4: raise ValueError('always here')\n",
        encoding="utf-8",
    )
    with run_script(tmp_path, script, world=1, options=("--max-restarts", 5)) as run:
        assert run.wait() == 1, run.console
    assert [one["steps"] for one in run.summary()["attempts"]] == [5, 5]
    assert "the same error after as many steps again" in run.console


def test_a_stop_reaches_each_rank_and_has_an_end(tmp_path):
    """SIGTERM first, for scripts that save then; one that does not end is killed after the grace period."""
    script = tmp_path / "own.py"
    script.write_text(
        "import os, signal, time\n"
        "def ask(number, frame):\n"
        "    open(f'asked_{os.environ[\"RANK\"]}', 'w').close()\n"
        "    if os.environ['RANK'] == '0': os._exit(0)\n"
        "signal.signal(signal.SIGTERM, ask)\n"
        "open(f'up_{os.environ[\"RANK\"]}', 'w').close()\n"
        "while True: time.sleep(0.1)\n",
        encoding="utf-8",
    )
    with run_script(tmp_path, script, options=("--grace-period", 1)) as run:
        poll(lambda: len(list(tmp_path.glob("up_*"))) == 2, what="both ranks")
        run.signal(signal.SIGINT)
        assert run.wait() == 130, run.console
    assert len(list(tmp_path.glob("asked_*"))) == 2


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # spawn: below
def test_loader_workers_of_a_script_start_by_every_method(tmp_path, one_epoch, method):
    """What is in ``__main__`` pickles, and workers import the script again."""
    words = ("--workers", 1, "--start-method", method, "--epochs", 1)
    # Python's sockets for tensors lie there, and have names of at most 108 bytes.
    with (
        tempfile.TemporaryDirectory() as short,
        run_script(tmp_path, TRAIN, *words, world=1, variables={"TMPDIR": short}) as run,
    ):
        assert run.wait() == 0, run.console
    assert weights(tmp_path) == one_epoch


def test_a_rank_killed_beside_spawned_workers_leaves_no_semaphore(tmp_path, one_epoch):
    """Python's own process removes them when all that used them have ended, unless it is killed."""
    (tmp_path / "harm_0_0_inside").write_text("os.kill(os.getpid(), 9)", encoding="utf-8")
    how = {"world": 1, "options": ("--max-restarts", 1)}
    words = ("--workers", 1, "--start-method", "spawn", "--epochs", 1)
    with (
        tempfile.TemporaryDirectory() as short,
        run_script(tmp_path, TRAIN, *words, variables={"TMPDIR": short}, **how) as run,
    ):
        assert run.wait() == 0, run.console
    assert weights(tmp_path) == one_epoch


def test_a_module_runs_as_python_m_does(tmp_path):
    """From the working directory, with its package."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "go.py").write_text(
        "import os, sys\nfrom . import __name__ as parent\n"
        "open(f'out_{os.environ[\"RANK\"]}', 'w').write(f'{parent} {__name__} {sys.argv[1:]}')\n",
        encoding="utf-8",
    )
    with run_script(tmp_path, "-m", "mine.go", "--lr", "1", world=1) as run:
        assert run.wait() == 0, run.console
    assert (tmp_path / "out_0").read_text() == "mine __main__ ['--lr', '1']"
    assert (run.logs / "attempt_0" / "rank_0.log").exists()


def test_an_error_of_a_module_s_package_is_shown(tmp_path):
    """The ranks raise it, once all is there; the supervisor has imported nothing of it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(
        "import os\nopen('importers', 'a').write(f\"{os.environ.get('RANK')} \")\n"
        "raise KeyError('no such recipe')\n",
        encoding="utf-8",
    )
    (tmp_path / "mine" / "go.py").touch()
    with run_script(tmp_path, "-m", "mine.go", world=1) as run:
        assert run.wait() == 1, run.console
    assert "KeyError: 'no such recipe'" in run.console
    assert 'mine/__init__.py", line 3' in run.console
    assert (tmp_path / "importers").read_text() == "0 "


SAVER = """
import os, signal, sys, torch
class Deadly:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
w = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([w], lr=0.1)
with open(f"words_{os.environ['RANK']}", "a") as file:
    file.write(f"{sys.argv[1:]}\\n")
begin = torch.load(sys.argv[sys.argv.index("--resume") + 1])["step"] if "--resume" in sys.argv else 0
for step in range(begin, 6):
    (w * w).sum().backward(); optimizer.step()
    if os.environ["RANK"] == "0" and step in (2, 5):
        deadly = [Deadly()] if step == 5 and not os.path.exists("injected") else []
        if deadly: open("injected", "w").close()
        torch.save({"step": step + 1, "deadly": deadly, "w": torch.ones(1000)}, "out.pt")
"""


def test_a_rank_killed_inside_a_save_leaves_the_file_before(tmp_path):
    """The next attempt is told to resume, and reads it; what was half written is gone after its next save."""
    script = tmp_path / "own.py"
    script.write_text(SAVER, encoding="utf-8")
    words = ("--resume-with", "*.pt:--resume {}")
    with run_script(tmp_path, script, "--lr", 1, options=words, world=1) as run:
        assert run.wait() == 0, run.console
    asked = (tmp_path / "words_0").read_text().splitlines()
    assert asked == ["['--lr', '1']", "['--lr', '1', '--resume', 'out.pt']"]
    assert [one["steps"] for one in run.summary()["attempts"]] == [6, 3]
    assert torch.load(tmp_path / "out.pt")["step"] == 6
    assert not list(tmp_path.glob(".out.pt.*"))


@pytest.mark.parametrize(("options", "code"), [((), 1), (("--from-scratch",), 0)])
def test_a_start_that_reads_nothing_of_what_was_saved_is_ended(tmp_path, options, code):
    """It would overwrite what it has; control: where that is wanted."""
    script = tmp_path / "own.py"
    script.write_text(SAVER, encoding="utf-8")
    with run_script(tmp_path, script, options=("--max-restarts", 2, *options), world=1) as run:
        assert run.wait() == code, run.console
    assert ("the script does not resume" in run.console) == bool(code)
