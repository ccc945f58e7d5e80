"""Two supervisors and their ranks: whatever dies on either, the weights are those of one machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest

from ddp_runner.__main__ import main
from ddp_runner.cli import checkpoints, kill
from ddp_runner.features.report import run_report as report
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.folder_owner import FolderOwner, new_term
from tests.features.machines.whole_runs.conftest import STEPS, TOKEN, free_port
from tests.processes import poll_settled
from tests.scenarios.harness import ROOT, TRAIN, ended, poll
from tests.scenarios.test_parents import HELD

SLOW = "task.pace_s=0.05"


def test_a_rank_lost_on_either_node_costs_no_step_and_no_bit(nodes, one_machine):
    """SIGKILL, an exception and an exit, the others keeping their processes; the world is that of both."""
    harms = ("--inject", "raise:rank=2,step=30,phase=backward", "--inject", "exit:rank=1,step=40")
    first, second = nodes.start(0, SLOW, *harms), nodes.start(1, SLOW, *harms)
    first.wait_for_step(5)
    stays = second.rank_pid(2), first.rank_pid(0)
    (node,) = first.status()["nodes"]
    assert (node["number"], node["is_there"]) == (1, True)
    assert 0 < node["round_trip_s"] < 3
    for run, rank, step in ((second, 3, 12), (first, 1, 20)):
        os.kill(run.rank_pid(rank), signal.SIGKILL)
        first.wait_for_step(step)
    assert (second.rank_pid(2), first.rank_pid(0)) == stays
    assert ended(first, second) == (0, 0), first.console + second.console
    summary = first.summary()
    assert (summary["exact"], summary["world_size"]) == (True, 4), summary
    faults = [(fault["kind"], fault["rank"], fault["steps_lost"]) for fault in summary["faults"]]
    killed = [("rank_killed", 3, 0), ("rank_killed", 1, 0)]
    assert faults == [*killed, ("rank_raised", 2, 0), ("rank_exited", 1, 0)], first.console
    here = socket.gethostname()
    assert f"rank 3 on {here}" in first.console
    assert {fault["host"] for fault in summary["faults"]} == {here}
    assert {event["host"] for event in first.events("fault")} == {here}
    assert first.digest == one_machine(4)
    # What rank 3 said is in the log of its own machine, and nothing of the run's there.
    assert (second.logs / "rank_3.log").exists()
    assert not (second.logs / "summary.json").exists()


def test_a_node_that_is_lost_comes_back_and_nothing_else_is_lost(nodes, one_machine):
    """SIGKILL of its supervisor, and one that is stopped until it counts as lost; ranks elsewhere stay."""
    nodes.ranks = 1
    slower = "task.pace_s=0.12"  # ranks train on while nothing is heard of their supervisor
    first, second = nodes.start(0, slower), nodes.start(1, slower)
    first.wait_for_step(8)
    stays = first.rank_pid(0)
    second.signal(signal.SIGKILL)
    second.assert_gone()
    second = nodes.start(1, slower)
    first.wait_for_step(20)
    second.signal(signal.SIGSTOP)
    poll(lambda: "is lost: nothing was heard" in first.console, what="its loss")
    second.signal(signal.SIGCONT)
    first.wait_for_step(30)
    assert first.rank_pid(0) == stays
    assert ended(first, second) == (0, 0), first.console + second.console
    summary = first.summary()
    assert [(fault["kind"], fault["steps_lost"]) for fault in summary["faults"]] == [
        ("node_lost", 0),
        ("node_lost", 0),
    ]
    assert (summary["exact"], first.digest) == (True, one_machine(2))


def test_it_goes_on_with_fewer_nodes_and_takes_more_in(nodes):
    """A node that comes late is taken in between two steps, and one that is asked to stop leaves."""
    nodes.ranks = 1
    few = (SLOW, "--rdzv-conf", "last_call_timeout=0.5", "max_steps=120")
    first = nodes.start(0, *few, nnodes="1:2")
    first.wait_for_step(5)
    second = nodes.start(1, *few, nnodes="1:2")
    poll(lambda: "2 ranks from here on" in first.console, what="two ranks")
    second.signal(signal.SIGTERM)
    assert second.wait() == 75, second.console
    assert "this node leaves" in second.console
    assert first.wait() == 0, first.console
    summary = first.summary()
    assert (summary["steps"], summary["world_size"]) == (120, 1)
    assert "the run begins with 1 of 2 ranks" in first.console
    assert not summary["exact"]
    assert any("of 2 ranks from step" in reason for reason in summary["inexact_reasons"])


def test_without_the_coordinator_a_node_ends_its_ranks_and_with_75(nodes, one_machine):
    """The same command on both then goes on from the newest checkpoint, to the same weights."""
    nodes.ranks = 1
    settings = (SLOW, "recovery.coordinator_wait_s=1")
    first, second = nodes.start(0, *settings), nodes.start(1, *settings)
    first.wait_for_checkpoint(20)
    first.signal(signal.SIGKILL)
    first.assert_gone()
    assert second.wait() == 75, second.console
    assert "the coordinator is lost" in second.console
    first, second = nodes.start(0, *settings), nodes.start(1, *settings)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert (first.summary()["steps"], first.digest) == (STEPS, one_machine(2))


def assert_of_second(formed, *, step, ranks=(2, 3)):
    """All ranks have the newest state of the second machine: any of its ranks may have been first."""
    (of_all,) = {(one["source"], one["committed_step"] >= step) for one in formed}
    assert of_all in {(rank, True) for rank in ranks}


def test_a_coordinator_that_comes_again_takes_the_ranks_of_others_over(nodes, one_machine):
    """SIGKILL of its supervisor, whose ranks end with it; the same command again: no step is done twice."""
    settings = (SLOW, "recovery.coordinator_wait_s=60", "save_interval=0")
    first, second = nodes.start(0, *settings), nodes.start(1, *settings)
    first.wait_for_step(30)
    os.kill(second.rank_pid(3), signal.SIGKILL)
    first.wait_for_step(34)
    pids = second.rank_pid(2), second.rank_pid(3)
    first.signal(signal.SIGKILL)
    first.assert_gone()
    first = nodes.start(0, *settings)
    first.wait_for_step(45)
    assert (second.rank_pid(2), second.rank_pid(3)) == pids
    assert ended(first, second) == (0, 0), first.console + second.console
    assert "its ranks have kept their memory" in first.console
    assert re.search(r"continues at step (3|4)\d, the newest state of all machines", first.console)
    again = first.events("rank_formed")[-4:]
    assert_of_second(again, step=34)
    assert (first.summary()["exact"], first.digest) == (True, one_machine(4))
    (fault,) = first.summary()["faults"]  # of the launch before
    known = (fault["kind"], fault["rank"], fault["steps_lost"], fault["launches_ago"])
    assert known == ("rank_killed", 3, 0, 1)
    assert fault["recovered_s"] > fault["detected_s"] > 0
    assert "rank 3 on" in first.console.rpartition("faults")[2], first.console


def test_a_take_over_without_old_logs_knows_why_it_is_inexact(nodes):
    """A coordinator on another machine, with empty folders: the machine that waits has heard it."""
    nodes.ranks = 1
    settings = (SLOW, "recovery.coordinator_wait_s=60", "save_interval=0", "save_every_steps=1000")
    settings += ("--inject", "oom:rank=1,step=5,phase=backward")
    first, second = nodes.start(0, *settings), nodes.start(1, *settings)
    poll(lambda: "micro-batches of" in str(first.status()), what="the reason")
    first.wait_for_step(first.committed() + 15)
    first.signal(signal.SIGKILL)
    first.assert_gone()
    for folder in (first.logs, first.checkpoints):
        folder.rename(folder.with_name(f"old_{folder.name}"))
    first = nodes.start(0, *settings)
    # The old journal alone knows that the fault has come: 1.
    assert ended(first, second) == (1, 1), first.console + second.console
    summary = first.summary()
    assert summary["steps"] == STEPS
    assert not summary["exact"]
    assert any("micro-batches of" in reason for reason in summary["inexact_reasons"])


def test_a_zygote_that_crashes_while_ranks_wait_loses_no_step(nodes, one_machine):
    """The coordinator is killed, then the zygote of the machine that has the only memory."""
    nodes.ranks = 1
    settings = (SLOW, "recovery.coordinator_wait_s=60", "save_interval=0", "save_every_steps=1000")
    first, second = nodes.start(0, *settings), nodes.start(1, *settings)
    first.wait_for_step(10)
    first.signal(signal.SIGKILL)
    first.assert_gone()
    poll(lambda: "wait for it, with their memory" in second.console, what="ranks that wait")
    second.signal(signal.SIGSEGV, second.named("ddp:zygote").pid)
    said = "the zygote died of SIGSEGV; starting another one"
    poll(lambda: said in second.console, what="another zygote")
    first = nodes.start(0, *settings)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert_of_second(first.events("rank_formed")[-2:], step=10, ranks=(1,))
    assert (first.summary()["exact"], first.digest) == (True, one_machine(2))


def test_a_coordinator_that_cannot_start_leaves_others_their_memory(nodes, one_machine):
    """Its import crashes after the other machine has come: that waits on, for the next coordinator."""
    nodes.ranks = 1
    settings = (SLOW, "recovery.coordinator_wait_s=60", "save_interval=0", "save_every_steps=1000")
    held, task = nodes.folder / "held", nodes.folder / "held.py"
    task.write_text(HELD.format(held=str(held)), encoding="utf-8")
    how = {"task": f"{task}:HeldTask"}
    first, second = (nodes.start(number, *settings, **how) for number in (0, 1))
    first.wait_for_step(10)
    first.signal(signal.SIGKILL)
    first.assert_gone()
    held.touch()
    first = nodes.start(0, *settings, **how)
    poll(lambda: "its ranks have kept their memory" in first.console, what="the other machine")
    first.signal(signal.SIGSEGV, first.named("ddp:zygote").pid)
    assert first.wait() == 1, first.console
    assert "the process that imports torch died of SIGSEGV" in first.console
    held.unlink()
    first = nodes.start(0, *settings, **how)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert_of_second(first.events("rank_formed")[-2:], step=10, ranks=(1,))
    assert (first.summary()["exact"], first.digest) == (True, one_machine(2))


def test_a_coordinator_whose_folder_was_taken_ends(nodes):
    """By another one that knows nothing of it, as after a split: it publishes nothing more, and orders nobody to end."""
    nodes.ranks = 1
    words = (SLOW, "recovery.coordinator_wait_s=1")
    first, second = nodes.start(0, *words), nodes.start(1, *words)
    first.wait_for_checkpoint(20)
    FolderOwner(first.checkpoints, new_term()).take()
    theirs = first.checkpoints / ".drill" / "step_99"  # what the other one is about to drill
    theirs.mkdir(parents=True)
    before = sorted(path.name for path in first.checkpoints.glob("step_*"))
    first.assert_gone()
    theirs.rmdir()  # and nobody has removed it
    theirs.parent.rmdir()
    assert ended(first, second) == (75, 75), first.console + second.console
    assert "another coordinator has taken" in first.console
    assert "the ranks here wait for it, with their memory" in second.console
    assert sorted(path.name for path in first.checkpoints.glob("step_*")) == before


def test_ranks_of_a_node_that_is_cut_off_train_and_publish_nothing(nodes, one_machine):
    """Also where the coordinator is only stopped. They keep their memory, and are taken back with it."""
    settings = (SLOW, "recovery.node_silent_s=2", "recovery.coordinator_wait_s=30")
    first, second = nodes.start(0, *settings), nodes.start(1, *settings)
    first.wait_for_step(5)
    pids = second.rank_pid(2), second.rank_pid(3)
    first.signal(signal.SIGSTOP)
    poll(lambda: "wait for it, with their memory" in second.console, what="ranks that wait")
    poll_settled(first.committed, what="ranks that train no more")
    assert first.committed() < STEPS
    first.signal(signal.SIGCONT)
    first.wait_for_step(first.committed() + 10)
    assert (second.rank_pid(2), second.rank_pid(3)) == pids
    assert ended(first, second) == (0, 0), first.console + second.console
    assert (first.summary()["exact"], first.digest) == (True, one_machine(4))


def test_who_does_not_fit_is_refused_in_one_line(nodes):
    """Wrong token, number of ranks, settings, run: exit 2. The coordinator says so and waits for the right one."""
    nodes.ranks = 1
    first = nodes.start(0, SLOW)
    poll(lambda: _listens(first), what="the coordinator")
    other = nodes.folder / "other"
    other.write_text("another-secret-of-them")
    other.chmod(0o600)
    for words, ranks, line in (
        (("--rdzv-id", "another"), 1, "--rdzv-id=another: the coordinator's run is none"),
        ((), 3, "-n=3: the coordinator has 1 rank"),
        (("evaluate_every_steps=5",), 1, "log.evaluate_every_steps=5: the coordinator has 0"),
        (("--nnodes", "2:3"), 1, "--nnodes=2:3: the coordinator has 2"),
        (("lr=0.5",), 1, "optim.learning_rate=0.5: the coordinator has "),
        (("--node-rank", "0", "--rdzv-conf", "is_host=0"), 1, "node 0 is there already"),
    ):
        refused = nodes.start(1, SLOW, *words, ranks=ranks)
        assert refused.wait() == 2, refused.console
        assert line in refused.console, refused.console
        assert "Traceback" not in refused.console
    assert f"a machine was refused ({socket.gethostname()}): -n=3: " in first.console
    unproved = nodes.start(1, SLOW, "--token-file", other)
    assert unproved.wait() == 2, unproved.console
    assert "is the token the same on all nodes?" in unproved.console
    second = nodes.start(1, SLOW)
    first.wait_for_step(2)
    for run in (first, second):
        run.signal(signal.SIGINT)
        time.sleep(0.1)
    assert ended(first, second) == (130, 130), first.console + second.console


def test_what_decides_collectives_is_given_to_the_coordinator_alone(nodes):
    """The other machine takes it: comparisons, evaluations and saves come at the same steps there."""
    nodes.ranks = 1
    words = ("replica_check_steps=2", "evaluate_at_start=true", "evaluate_batches=1")
    words += ("evaluation_batch_size=3", "explosion_loss_max=1000")
    first, second = (nodes.start(0, "--max-steps", 6, *words), nodes.start(1, "--max-steps", 6))
    assert ended(first, second) == (0, 0), first.console + second.console
    summary = first.summary()
    assert (summary["exact"], summary["faults"]) == (True, []), first.console


def test_commands_on_a_follower_name_the_machine_with_the_files(nodes, monkeypatch):
    """Its own folders have the logs of its ranks alone."""
    nodes.ranks = 1
    first, second = (nodes.start(number, "--max-steps", 2) for number in (0, 1))
    assert ended(first, second) == (0, 0), first.console + second.console
    monkeypatch.chdir(nodes.folder)
    (nodes.folder / "logs").mkdir()
    second.logs.rename(nodes.folder / "logs" / "mine")
    where = f"this machine followed a run of {socket.gethostname()}, where it is in "
    for command, words, folder in (
        (report, ["--name", "mine"], first.logs),
        (report, [], first.logs),
        (kill, ["1", "--name", "mine"], first.logs),
        (checkpoints, ["list", "--name", "mine"], first.checkpoints),
        (checkpoints, ["list"], first.checkpoints),
    ):
        with pytest.raises(BadInputError, match=f"; {re.escape(where + str(folder))}$"):
            command.DECLARATION.run(words)


def _mine(nodes, number, rate):
    """A task that imports a file of its own, as it is in the checkout of one machine."""
    folder = nodes.folder / f"node{number}"
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(
        "from helper import RATE\nfrom tests.scenarios.workload import PacedTask\n\n"
        "class Mine(PacedTask):\n    rate = RATE\n"
    )
    (folder / "helper.py").write_text(f"RATE = {rate}\n")


def test_a_stale_checkout_is_refused_and_named(nodes):
    """A file that the task imports, with both hosts; with the same code the start block says so."""
    nodes.ranks = 1
    _mine(nodes, 0, 1), _mine(nodes, 1, 2)
    first = nodes.start(0, "--max-steps", 4, task="mine.py")
    poll(lambda: _listens(first), what="the coordinator")
    refused = nodes.start(1, "--max-steps", 4, task="mine.py")
    assert refused.wait() == 2, refused.console
    here, line = socket.gethostname(), refused.console.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"ddp_runner: error: helper.py: is \w{{12}} on {here}, and \w{{12}} on {here}, the "
        "coordinator's: run the same code on all, or give the coordinator --allow-different-code",
        line,
    ), refused.console
    _mine(nodes, 1, 1)
    second = nodes.start(1, "--max-steps", 4, task="mine.py")
    assert ended(first, second) == (0, 0), first.console + second.console
    assert re.search(r"2 on 2 machines, same code \w{6}, the CPU", first.console), first.console
    assert first.summary()["exact"]


def test_different_code_that_is_allowed_is_not_exact(nodes):
    """The run trains on, and its reason names the file."""
    nodes.ranks = 1
    _mine(nodes, 0, 1), _mine(nodes, 1, 2)
    words = ("--max-steps", 4, "--allow-different-code")
    first, second = (nodes.start(number, *words, task="mine.py") for number in (0, 1))
    assert ended(first, second) == (0, 0), first.console + second.console
    summary = first.summary()
    assert not summary["exact"]
    assert [reason.partition(":")[0] for reason in summary["inexact_reasons"]] == ["helper.py"]
    assert "same code" not in first.console


def test_what_cannot_begin_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    """Before any process, port or folder."""
    monkeypatch.chdir(tmp_path)
    for words, token, line in (
        (
            ("--node-rank", "1", "--rdzv-conf", "join_timeout=0.5"),
            "",
            "DDP_RUNNER_TOKEN: is needed with several machines",
        ),
        ((), "short", "DDP_RUNNER_TOKEN: must have at least 16 characters"),
        (("--token-file", "none"), TOKEN, "--token-file=***: No such file or directory"),
        (("--rdzv-endpoint", "no.such.host"), TOKEN, "--rdzv-endpoint=no.such.host: is no name"),
        (("--local-addr", "10.254.254.254"), TOKEN, "--local-addr=10.254.254.254: is no address"),
        (
            ("--node-rank", "1", "--rdzv-conf", "is_host=1"),
            TOKEN,
            "--node-rank=1: must be 0 where is_host=1",
        ),
        (("--dry-run",), TOKEN, "--dry-run: is for one machine: give --nnodes 1 with it"),
        (("-n", "0"), TOKEN, "--nproc-per-node=0: must be"),
    ):
        monkeypatch.setenv("DDP_RUNNER_TOKEN", token)
        there = ("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1")
        assert main(["train", "--cpu", *there, *words]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"ddp_runner: error: {line}"), said.err
        assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def _listens(run):
    assert run.process.poll() is None, run.console
    run._note_listening()
    return run.ports_seen > 0


LATE_CONSOLE = """
import sys, time
from ddp_runner.observe import terminal

pump = terminal.ConsoleWriter._pump
terminal.ConsoleWriter._pump = lambda self: (time.sleep(1.2), pump(self))
from ddp_runner.__main__ import main

sys.exit(main(sys.argv[1:]))
"""


def test_what_a_machine_says_last_is_shown(tmp_path):
    """Also where its console is written late, as on busy cores: the process ends after that."""
    ended = subprocess.run(
        [
            *(sys.executable, "-c", LATE_CONSOLE, "train", "--cpu", "--task", "synthetic"),
            *("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
            *("--rdzv-conf", "join_timeout=0.5", "log.display=plain"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DDP_RUNNER_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 75, ended.stderr
    assert "no coordinator answered" in ended.stdout


@pytest.mark.parametrize("answer", ["nobody", "another service"])
def test_an_endpoint_that_is_nobodys_is_one_line_and_75(tmp_path, answer):
    """Something else may listen there. No folder is made, and whoever starts it again finds all as it was."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        if answer == "another service":
            server = stack.enter_context(socketserver.TCPServer(("127.0.0.1", port), _Web))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        ended = subprocess.run(
            [
                *(*TRAIN, "--cpu", "--task", "synthetic", "--nnodes", "2", "--node-rank", "1"),
                *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "join_timeout=0.5"),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "DDP_RUNNER_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert ended.returncode == 75, ended.stderr
    said = "what answers there is not ready: what answers there is no node of this version"
    assert (said in ended.stdout) is (answer == "another service"), ended.stdout
    assert f"no coordinator answered at 127.0.0.1:{port} within 0.5 s" in ended.stdout
    assert not list(tmp_path.iterdir())


class _Web(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.recv(1 << 10)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
