"""What a task is given as a secret is in no file, line or process of the run; a resume compares it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import yaml

from ddp_runner import launch
from tests import ready
from tests.scenarios.harness import Run

from .test_scripts import run_script

SECRETIVE = f"{Path(__file__).with_name('mistaken.py')}:Secretive"
SECRET, OTHER = "hunter2-and-more", "another-one"
KEPT = "hunter4-beside-the-configuration"
LAUNCHED = "hunter3-of-launch"  # a test beside this one may have the other on a command line
SETTINGS = ("-b", 8, "num_workers=1", "save_every_steps=2")


def files_with(folder, secret):
    """Every file below ``folder``, of whatever kind, that holds the text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if secret.encode() in path.read_bytes()]


def test_a_secret_is_nowhere_and_a_resume_needs_the_same_one(tmp_path, tmp_path_factory):
    """From the environment, a word, a .env; without faults, and in an exception that shows it."""
    asked = {"DDP_RUNNER_TASK__API_KEY": SECRET}
    beside = tmp_path_factory.mktemp("beside")
    (beside / "run.yaml").write_text("max_steps: 4\n")
    (beside / ".env").write_text(f"SERVICE_TOKEN={KEPT}\nDDP_RUNNER_TASK__API_KEY={OTHER}\n")
    words = (*SETTINGS, "--config", beside / "run.yaml")
    with Run(tmp_path, *words, task=SECRETIVE, variables=asked) as run:
        run.wait_for_event("world_formed")
        for process in run.processes():
            with contextlib.suppress(OSError):  # such as a drill, which has ended meanwhile
                assert SECRET.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert run.wait() == 0, run.console
    for secret in (SECRET, KEPT, OTHER):
        assert files_with(tmp_path, secret) == []
        assert secret not in run.console
    assert "read with ***" in run.console
    assert ".env: SERVICE_TOKEN" in run.console
    recorded = yaml.safe_load((run.logs / "config.yaml").read_text(encoding="utf-8"))
    assert recorded["task"] == {"api_key": "***"}
    first = json.loads((run.checkpoints / "step_00000004.json").read_text(encoding="utf-8"))
    assert "logging in with *** and ***" in (run.logs / "rank_1.log").read_text(encoding="utf-8")

    words = (*SETTINGS, "--max-steps", 8)
    with Run(tmp_path, *words, f"task.api_key={OTHER}", task=SECRETIVE) as run:
        assert run.wait() == 2, run.console
    assert "task.api_key: *** -> ***" in run.console
    assert OTHER not in run.console
    with Run(tmp_path, *words, "--config", run.logs / "config.yaml", task=SECRETIVE) as run:
        assert run.wait() == 2, run.console
    assert "task.api_key: is hidden in that file (***); give it again" in run.console

    (tmp_path / "outage").touch()
    with Run(tmp_path, *words, f"task.api_key={SECRET}", task=SECRETIVE) as run:
        assert run.wait() == 1, run.console
    assert "the service refuses ***" in run.console
    assert files_with(tmp_path, SECRET) == []
    assert run.events("run_begins")[-1]["command"][-1] == "task.api_key=***"
    assert run.summary()["steps"] == 4
    sealed = first["meaning"]["task.api_key"]
    assert sealed.startswith("*** scrypt ")


def test_launch_puts_no_secret_on_a_command_line(tmp_path, monkeypatch):
    """Every user can read those; a file that only this one can read carries it."""
    monkeypatch.chdir(tmp_path)
    task = tmp_path / "looks.py"
    task.write_text(
        "import pathlib\n"
        "from tests.scenarios.mistaken import NotedData\n"
        "class Looks(NotedData):\n"
        "    def __init__(self, api_key: str):\n"
        "        files = pathlib.Path('/proc').glob('[0-9]*/cmdline')\n"
        f"        assert api_key == {LAUNCHED[:7]!r} + {LAUNCHED[7:]!r}\n"
        "        for file in files:\n"
        "            try:\n"
        "                assert api_key.encode() not in file.read_bytes(), file\n"
        "            except OSError:\n"
        "                pass\n"
    )
    settings = ["--cpu", "-b", "8", "num_workers=0", "--max-steps", "1"]
    for words in ([f"task.api_key={LAUNCHED}"], ["--task.api_key", LAUNCHED]):
        if len(words) == 2:  # behind the command's own line, all that is started is the same
            for name, value in ready.environment().items():
                monkeypatch.setenv(name, value)
        folders = ["-l", f"logs{len(words)}", "-c", f"checkpoints{len(words)}"]
        result = launch(f"{task}:Looks", nproc=1, arguments=[*settings, *folders, *words])
        assert result.exit_code == 0


SHORT = "hunt3r"  # of a .env, whose names are all meant
ABORTING = f"{Path(__file__).with_name('mistaken.py')}:Aborting"
RAISING = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise RuntimeError(f"the service refuses {os.environ['SERVICE_TOKEN']}")
if "recorded" in sys.argv:
    try: main()
    except BaseException: os._exit(9)
main.__wrapped__()
"""


def assert_shown_nowhere(run, secret):
    """In no file about the run, and not on the console; what a rank prints itself stands in its log."""
    for name in ("summary.json", "events.jsonl", "status.json", "supervisor.log"):
        assert secret not in (run.logs / name).read_text(encoding="utf-8"), name
    assert secret not in run.console


@pytest.mark.parametrize("how", ["raised", "recorded"])
def test_a_script_that_raises_with_a_secret_does_not_publish_it(tmp_path, how):
    """In the traceback that is shown, and in what ``@record`` has written."""
    script = tmp_path / "raising.py"
    script.write_text(RAISING, encoding="utf-8")
    variables = {"SERVICE_TOKEN": SECRET}
    with run_script(tmp_path, script, how, world=1, variables=variables) as run:
        assert run.wait() == (9 if how == "recorded" else 1), run.console
    assert_shown_nowhere(run, SECRET)
    assert "the service refuses ***" in run.console
    attempt = run.summary()["attempts"][0]
    assert attempt["cause"].startswith("RuntimeError: the service refuses ***")


def test_the_last_words_of_a_rank_are_published_without_its_secrets(tmp_path, tmp_path_factory):
    """Which the supervisor reads and makes a fault of; of a .env short ones are hidden, too."""
    beside = tmp_path_factory.mktemp("beside")
    (beside / "run.yaml").write_text("max_steps: 2\n")
    (beside / ".env").write_text(f"DB_PASSWORD={SHORT}\n")
    words = (*SETTINGS, "--config", beside / "run.yaml", "num_workers=0")
    with Run(tmp_path, *words, task=ABORTING) as run:
        assert run.wait() == 0, run.console
    assert SHORT in (run.logs / "rank_1.log").read_text(encoding="utf-8")
    assert_shown_nowhere(run, SHORT)
    (fault,) = run.summary()["faults"]
    assert fault["cause"].startswith("rank 1 killed (SIGABRT")
    assert "no ***" in fault["cause"]
    assert "no ***" in fault["detail"]
