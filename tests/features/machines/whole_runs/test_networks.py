"""Network namespaces, each a machine to the others: links between them are cut for real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import uuid
from pathlib import Path

import pytest

from tests import ready
from tests.features.machines.whole_runs.conftest import SETTINGS, TOKEN
from tests.features.machines.whole_runs.test_majority import LEADS
from tests.features.machines.whole_runs.test_scripts import NAMES, SCRIPT, began
from tests.scenarios.harness import (
    HURRY_NAME,
    NO_DRILLS,
    ONE_THREAD,
    ROOT,
    WORKLOAD,
    poll,
    processes_with,
)

# Loopback in each, and a bridge between them; all of it ends with the last process in here.
NETWORK = """
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add bridge0 type bridge
ip link set bridge0 up
for k in 0 1 2; do
    ip netns add node$k
    ip link add wire$k type veth peer name end$k
    ip link set end$k netns node$k
    ip link set wire$k master bridge0 up
    ip -n node$k link set lo up
    ip -n node$k addr add 10.9.0.$((k + 1))/24 dev end$k
    ip -n node$k link set end$k up
done
echo made
"""


def _may_make_networks():
    made = subprocess.run(
        ["unshare", "-Urnm", "sh", "-c", NETWORK], capture_output=True, check=False, timeout=30
    )
    return made.stdout == b"made\n"


class Network:
    """A shell inside the namespaces, which runs a line at a time."""

    def __init__(self):
        self.mark = f"NETWORK_TEST={uuid.uuid4().hex}"
        self.shell = subprocess.Popen(
            ["unshare", "-Urnm", "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started = []
        self._folders = []
        self.run(NETWORK.replace("set -e", ""))

    def run(self, line):
        self.shell.stdin.write(f"{line}\necho ran\n")
        self.shell.stdin.flush()
        while (said := self.shell.stdout.readline()) not in ("ran\n", ""):
            pass
        assert said, "the shell has ended"

    def start(self, number, folder, *words):
        """A supervisor on machine ``number``."""
        command = ("train", "--cpu", "-n", 1, NO_DRILLS, ONE_THREAD)
        command += ("--task", f"{WORKLOAD}:PacedTask", "-l", folder / "logs", "-c", folder / "kept")
        self._start(number, folder, *command, *SETTINGS, *words)

    def run_script(self, number, folder, *words):
        """``run`` on machine ``number``."""
        options = ("-l", folder / "logs", "log.display=plain")
        self._start(number, folder, "run", "--cpu", "-n", 1, *options, *words)

    def _start(self, number, folder, *words):
        folder.mkdir(exist_ok=True)
        self._folders.append(folder)
        name, value = self.mark.split("=")
        variables = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "DDP_RUNNER_TOKEN": TOKEN}
        shell = f"/proc/{self.shell.pid}"
        with (folder / "console.txt").open("ab") as output:
            process = ready.shared().start(
                [str(word) for word in words],
                cwd=folder,
                output=output,
                env={**os.environ, **variables, name: value},
                namespaces=(f"{shell}/ns/user", f"{shell}/root/run/netns/node{number}"),
            )
        self.started.append(process)

    def hurry(self):
        """Have no step take longer than it must from here on."""
        for folder in self._folders:
            (folder / HURRY_NAME).touch()

    def end(self):
        with self.shell:  # which closes its pipes and waits
            os.killpg(self.shell.pid, signal.SIGKILL)


@pytest.fixture
def network():
    if not Path("/usr/bin/unshare").exists() or not _may_make_networks():
        pytest.skip("this machine lets nobody make a network namespace")
    made = Network()
    yield made
    made.end()
    for process in processes_with(made.mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    for process in made.started:
        process.wait()


@pytest.mark.whole_run
def test_a_link_that_is_cut_costs_no_step_and_no_bit(network, tmp_path, made_once):
    """Neither side is closed: each finds out by silence. Up again, the machine is taken back."""
    words = ("--nnodes", 2, "--rdzv-endpoint", "10.9.0.1:29500", "task.pace_s=0.1")
    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders):
        network.start(number, folder, *words)

    def console(number):
        path = folders[number] / "console.txt"  # which the shell makes when it comes to it
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def status():
        path = folders[0] / "logs" / "status.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"step": -1}

    poll(lambda: status()["step"] >= 10, what=f"ten steps: {console(0)}")
    network.run("ip link set wire1 down")
    poll(lambda: "is lost: nothing was heard" in console(0), what="the loss")
    poll(lambda: "the ranks here wait for it" in console(1), what="ranks that wait")
    assert status()["step"] < 60
    network.run("ip link set wire1 up")
    network.hurry()
    summary = folders[0] / "logs" / "summary.json"
    poll(summary.exists, timeout_s=90.0, what=f"the end: {console(0)}{console(1)}")
    found = json.loads(summary.read_text(encoding="utf-8"))
    assert [(one["kind"], one["steps_lost"]) for one in found["faults"]] == [("node_lost", 0)]
    assert (found["exact"], found["weights_sha256"]) == (
        True,
        made_once(*SETTINGS, world=2).digest,
    )


# What goes to the first machine is dropped in silence, but for its endpoint.
FIREWALL = """
ip -n node1 neigh add 10.9.0.99 lladdr 02:00:00:00:00:99 dev end1
ip -n node1 route add 10.9.0.1/32 via 10.9.0.99 dev end1 onlink table 5
ip -n node1 rule add pref 10 ipproto tcp dport 29500 lookup main
ip -n node1 rule add pref 20 to 10.9.0.1 lookup 5
"""


@pytest.mark.whole_run
def test_a_firewall_that_passes_the_endpoint_alone_is_one_line(network, tmp_path):
    """It names both machines and what to do, and neither waits for ever."""
    network.run(FIREWALL)
    words = ("--nnodes", 2, "--rdzv-endpoint", "10.9.0.1:29500", "recovery.form_timeout_s=2")
    for number in range(2):
        network.start(number, tmp_path / f"machine{number}", *words, "--node-rank", number)
    summary = tmp_path / "machine0" / "logs" / "summary.json"
    consoles = [tmp_path / f"machine{number}" / "console.txt" for number in range(2)]
    poll(summary.exists, timeout_s=90.0, what=f"the end: {consoles}")
    poll(lambda: not processes_with(network.mark), what="the ends of all")
    host = socket.gethostname()
    line = (
        f"the ranks did not form within 2 s: perhaps node 0 ({host}) and node 1 ({host}) cannot reach"
        " each other: let TCP through between them"
    )
    for console in consoles:
        (ends,) = [
            one
            for one in console.read_text().splitlines()
            if "gave up" in one and "generations" in one
        ]
        assert line in ends
    assert json.loads(summary.read_text(encoding="utf-8"))["exit_code"] == 3


# Between the second machine and the third nothing passes; both reach the first.
CUT_BETWEEN_FOLLOWERS = """
ip -n node1 neigh add 10.9.0.99 lladdr 02:00:00:00:00:99 dev end1
ip -n node1 route add 10.9.0.3/32 via 10.9.0.99 dev end1 onlink
"""


@pytest.mark.whole_run
def test_two_followers_that_lose_each_other_end_the_run_saved(network, tmp_path):
    """No process is to blame, so the line names the machines. That the same commands go on from there is any resume's."""
    words = ("--nnodes", 3, "--rdzv-endpoint", "10.9.0.1:29500", "task.pace_s=0.05")
    words += ("recovery.form_timeout_s=3", "recovery.hang_min_s=2")
    folders = [tmp_path / f"machine{number}" for number in range(3)]
    logs = folders[0] / "logs"
    for number, folder in enumerate(folders):
        network.start(number, folder, *words, "--node-rank", number)

    def consoles():
        return [(one / "console.txt").read_text() for one in folders]

    def status():
        path = logs / "status.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"step": -1}

    poll(lambda: status()["step"] >= 10, what="ten steps")
    network.run(CUT_BETWEEN_FOLLOWERS)
    poll((logs / "summary.json").exists, timeout_s=120.0, what=f"the end: {tmp_path}")
    poll(lambda: not processes_with(network.mark), what="the ends of all")
    summary = json.loads((logs / "summary.json").read_text(encoding="utf-8"))
    assert (summary["exit_code"], summary["checkpoint_step"]) == (3, summary["steps"])
    (ends,) = [
        one for one in consoles()[0].splitlines() if "gave up" in one and "generations" in one
    ]
    assert "cannot reach each other: let TCP through between them" in ends
    assert not [one for one in summary["faults"] if "the store process died" in one["cause"]]


@pytest.mark.whole_run
def test_a_script_goes_on_with_fewer_behind_a_link_that_is_cut(network, tmp_path):
    """Its ranks find each other though both hosts have one name, and those of the lost machine end."""
    folders = [tmp_path / "first", tmp_path / "second"]
    words = ("--nnodes", "1:2", "--rdzv-endpoint", "10.9.0.1:29500", "--max-restarts", 3)
    words += ("recovery.node_patience_s=1", "train.py", 80, tmp_path / "kept.pt", NAMES)
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        network.run_script(number, folder, *words)

    def log(number, attempt):
        path = folders[number] / "logs" / f"attempt_{attempt}" / f"rank_{number}.log"
        return path.read_text() if path.exists() else ""

    poll(lambda: "began" in log(1, 0), what="the start")
    assert began(log(1, 0))[1]["MASTER_ADDR"] == "10.9.0.1"
    poll((tmp_path / "kept.pt").exists, what="a checkpoint")
    network.run("ip link set wire1 down")
    poll(lambda: "began" in log(0, 1), what="the next start")
    step, variables = began(log(0, 1))
    assert (step > 0, variables["WORLD_SIZE"]) == (True, "1")
    assert "ended with" not in log(1, 0)
    network.run("ip link set wire1 up")
    poll((folders[0] / "logs" / "summary.json").exists, what="the end")
    found = json.loads((folders[0] / "logs" / "summary.json").read_text(encoding="utf-8"))
    assert (found["status"], found["world_size"]) == ("completed", 1)
    assert "is lost: nothing was heard" in found["attempts"][0]["cause"]


@pytest.mark.whole_run
def test_a_coordinator_whose_link_is_cut_is_replaced_and_follows(network, tmp_path, made_once):
    """The two others elect one of them. The old one commits nothing alone, ends with 75, and its next start follows."""
    words = ("--nnodes", "2:3", "--rdzv-endpoint", "10.9.0.1:29500", "task.pace_s=0.1")
    words += ("recovery.elect_coordinator=true", "recovery.node_patience_s=300")
    folders = [tmp_path / f"machine{number}" for number in range(3)]

    def console(number):
        return (folders[number] / "console.txt").read_text()

    def committed(number):
        path = folders[number] / "logs" / f"audit_rank_{number}.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    for number, folder in enumerate(folders):
        network.start(number, folder, *words, "--node-rank", number)
    poll(lambda: committed(0) >= 10, what="ten steps")
    network.run("ip link set wire0 down")
    poll(lambda: LEADS in console(1) + console(2), what=f"an election: {console(1)}{console(2)}")
    before = committed(0)
    poll(lambda: "nothing was heard of it" in console(0), what=f"the loss: {console(0)}")
    assert committed(0) == before
    network.run("ip link set wire0 up")
    old = network.started[0]
    assert old.wait(timeout=60.0) == 75, console(0)
    assert "a majority has elected another coordinator" in console(0)
    assert committed(0) == before
    network.start(0, folders[0], *words, "--node-rank", 0)
    poll(lambda: "was elected: following it" in console(0), what=f"a follower: {console(0)}")
    network.hurry()
    poll(lambda: not processes_with(network.mark), timeout_s=120.0, what=f"the end: {console(0)}")
    (summary,) = list(tmp_path.glob("machine[12]/logs/summary.json"))
    found = json.loads(summary.read_text(encoding="utf-8"))
    assert (found["status"], found["exact"]) == ("completed", True), found
    assert found["weights_sha256"] == made_once(*SETTINGS, world=3).digest


@pytest.mark.whole_run
def test_a_coordinator_without_power_is_followed_and_the_others_go_on(network, tmp_path):
    """Everything on the first machine is killed: the second or third coordinates at its own address, and both finish."""
    shared = tmp_path / "shared"
    words = ("--nnodes", "2:3", "--rdzv-endpoint", "10.9.0.1:29500", "task.pace_s=0.1")
    words += ("-c", shared / "kept", "-l", shared / "logs", "recovery.node_patience_s=0")
    folders = [tmp_path / f"machine{number}" for number in range(3)]

    def consoles():
        return [(one / "console.txt").read_text() for one in folders]

    def status():
        path = shared / "logs" / "status.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"step": -1}

    for number, folder in enumerate(folders):
        network.start(number, folder, *words, "--node-rank", number)
    poll(lambda: status()["step"] >= 10, what="ten steps")
    network.run("ip netns pids node0 | xargs kill -9")
    network.hurry()
    summary = shared / "logs" / "summary.json"
    poll(summary.exists, timeout_s=120.0, what=f"the end: {tmp_path}")
    poll(lambda: not processes_with(network.mark), what="the ends of all")
    found = json.loads(summary.read_text(encoding="utf-8"))
    assert (found["status"], found["exit_code"], found["steps"]) == ("completed", 0, 60), consoles()
    assert (found["world_size"], found["exact"]) == (2, False)
    (owner, where) = (shared / "kept" / ".owner").read_text().splitlines()
    assert where in ("10.9.0.2 29500", "10.9.0.3 29500"), owner
    leads = [one.count("this machine coordinates from here on") for one in consoles()]
    assert sorted(leads) == [0, 0, 1]
