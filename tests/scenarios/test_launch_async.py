"""launch_async(): a run beside an event loop, cancelled with a checkpoint and gone on with."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile

import pytest

from ddp_runner import BadInputError, launch_async
from ddp_runner.cli.from_code import launch_async as module
from tests import ready
from tests.scenarios.leftovers import processes_with

SMALL = {
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.seq_len": 8,
    "data.batch_size": 2,
    "data.num_workers": 0,
    "run.device": "cpu",
    "run.threads_per_rank": 1,
    "log.log_interval": 1,
    "checkpoint.save_every_steps": 0,
    "log.evaluate_batches": 1,
    "recovery.drill_at": None,
}


def config(folder, **changes):
    folders = {"run.log_dir": str(folder / "logs"), "run.checkpoint_dir": str(folder / "ckpt")}
    return {**SMALL, **folders, **changes}


def step_of(folder):
    try:
        return json.loads((folder / "logs" / "status.json").read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError):
        return 0


async def cancelled_at(folder, step):
    """Cancel the run once it has come so far; how often the loop has turned meanwhile."""
    turns = 0
    running = asyncio.ensure_future(
        launch_async("synthetic", nproc=1, config=config(folder, **{"run.max_steps": 1_000_000}))
    )
    while step_of(folder) < step and not running.done():
        await asyncio.sleep(0.01)
        turns += 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return turns


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """The runs are forks of the ready process."""
    for name, value in ready.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def mark(monkeypatch, tmp_path):
    """What each process of the test's runs has in its environment."""
    monkeypatch.setenv("TEST_OF_LAUNCH_ASYNC", str(tmp_path))
    return f"TEST_OF_LAUNCH_ASYNC={tmp_path}"


def test_a_cancelled_run_is_saved_and_goes_on(tmp_path, mark, capsys):
    """As after SIGTERM; the loop turns all the while, and no handler of the program is another one."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    turns = asyncio.run(cancelled_at(tmp_path, 20))
    assert turns > 20
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert processes_with(mark) == []
    stopped = json.loads((tmp_path / "logs" / "summary.json").read_text(encoding="utf-8"))
    assert (stopped["status"], stopped["exit_code"]) == ("preempted", 75)
    assert stopped["steps"] >= 20
    assert stopped["checkpoint_step"] == stopped["steps"]
    end = stopped["steps"] + 5
    result = asyncio.run(
        launch_async("synthetic", nproc=1, config=config(tmp_path, **{"run.max_steps": end}))
    )
    assert (result.exit_code, result.summary["steps"]) == (0, end)
    assert result.summary["run_id"] == stopped["run_id"]
    assert result.log_dir == tmp_path / "logs"
    assert "completed" in capsys.readouterr().out


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_call_that_is_cancelled_early_leaves_nothing(tmp_path, mark, monkeypatch, turns):
    """No process, and no configuration file: its secrets were in it, and a thread was at it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def cancelled():
        running = asyncio.ensure_future(launch_async("synthetic", nproc=1, config=config(tmp_path)))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert list(tmp_path.iterdir()) == []
    assert processes_with(mark) == []


def test_a_call_cancelled_twice_ends_its_run_at_once(tmp_path, monkeypatch):
    """The first time it saves; that has been waited for, and still the error is a cancelled call's."""
    heard = tmp_path / "heard"
    child = (
        "import pathlib, signal, time\n"
        f"heard = pathlib.Path({str(heard)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: heard.write_text('it saves'))\n"
        "heard.write_text('runs')\n"
        "while True: time.sleep(60)\n"
    )
    monkeypatch.setattr(module, "child_command", lambda words: [sys.executable, "-c", child])

    async def content_is(text):
        while not heard.exists() or heard.read_text() != text:  # noqa: ASYNC110 - a process writes it
            await asyncio.sleep(0.01)

    async def cancelled_twice():
        running = asyncio.ensure_future(launch_async("synthetic", config=config(tmp_path)))
        for text in ("runs", "it saves"):
            await content_is(text)
            assert not running.done()
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(asyncio.wait_for(cancelled_twice(), 30))


def test_wrong_settings_are_refused_as_by_launch(tmp_path):
    """Before any process is started."""
    wrong = config(tmp_path, **{"run.max_steps": -1})
    with pytest.raises(BadInputError, match="max_steps"):
        asyncio.run(launch_async("synthetic", config=wrong))
    assert not (tmp_path / "logs").exists()


def test_it_refuses_to_start_runs_in_a_rank(monkeypatch):
    """A file that calls it at its top level would start a run in each rank."""
    monkeypatch.setenv("DDP_RUNNER_LAUNCHED", "1")
    with pytest.raises(RuntimeError, match="__main__"):
        asyncio.run(launch_async("synthetic"))
