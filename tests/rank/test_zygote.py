"""The zygote as a real module process: what it forks is the supervisor's, and dies with it."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta

import psutil
import pytest

from ddp_runner.kernel.rank import zygote
from ddp_runner.kernel.rank.zygote import fork_to_supervisor
from ddp_runner.kernel.rules.helper_roles import STORE
from ddp_runner.kernel.rules.lifecycle import RankEvent
from ddp_runner.kernel.system.control_channel import Channel
from ddp_runner.kernel.wire.events import RankFormed, ZygoteReady
from ddp_runner.kernel.wire.fork_specs import ForkKind, NothingMore, SpareKind, SpareSpec
from ddp_runner.kernel.wire.messages import NO_PROCESS, Finished, Fork, Forked, Ready
from tests.processes import poll, ranks, run_ranks

from .supervising import PlayedSupervisor, answers_on, parent_of, threads_of

SPARES = SpareSpec(
    settings={},
    device="cpu",
    world_size=1,
    local_world_size=1,
    threads=1,
    store_host="127.0.0.1",
    store_port=1,
    kind=SpareKind.CPU,
)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def cpu_s(pid):
    """How long the process has computed."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def connect(port):
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))


def _host_stores(me, folder):
    """A store, used, killed, replaced, used again; then the zygote is killed under it."""
    facts = {}
    played = PlayedSupervisor(folder, 1)
    played.until(lambda: played.world.can_fork)
    (ready,) = [message for message in played.heard if isinstance(message, ZygoteReady)]
    facts["import_s"], facts["warning"] = ready.import_s, ready.warning
    facts["zygote_cpu_s"] = cpu_s(played.zygote_pid)
    facts["zygote_threads"] = threads_of(played.zygote_pid)
    facts["zygote_name"] = psutil.Process(played.zygote_pid).name()

    played.spawn_store()
    first = played.store_pid
    facts["fork_cpu_s"] = cpu_s(first)
    facts["parent_is_us"] = parent_of(first) == os.getpid()
    port = played.node.store_at.port
    client = connect(port)
    client.set("key", "value")
    facts["value"] = connect(port).get("key")

    os.kill(first, signal.SIGKILL)
    played.until(lambda: played.node.helper(STORE) is None)
    facts["reaped"] = [signal_number for pid, _, signal_number in played.ended if pid == first]
    facts["port_held"] = answers_on(port)
    played.spawn_store()
    facts["same_port"] = played.node.store_at.port == port
    facts["replaced"] = played.store_pid != first
    second_client = connect(port)
    facts["keys_of_the_first"] = second_client.check(["key"])
    second_client.set("key", "again")

    zygote = played.zygote_pid
    os.kill(zygote, signal.SIGKILL)
    played.until(lambda: any(pid == zygote for pid, _, _ in played.ended))
    facts["store_outlives_zygote"] = second_client.get("key")
    facts["parent_is_still_us"] = parent_of(played.store_pid) == os.getpid()

    store = played.store_pid
    played.node.close()
    played.until(lambda: any(pid == store for pid, _, _ in played.ended))
    facts["store_exit"] = [code for pid, code, _ in played.ended if pid == store]
    return facts


# One test process has all of these tests, and makes it once.
pytestmark = pytest.mark.xdist_group("zygote")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return run_ranks(_host_stores, 1, tmp_path_factory.mktemp("run"))[0]


def test_a_zygote_that_is_ready_has_one_thread(facts):
    """A fork beside other threads could inherit a lock that nobody will ever release."""
    assert facts["zygote_threads"] == 1
    assert facts["zygote_name"] == "ddp:zygote"
    assert facts["warning"] == ""


def test_a_fork_takes_no_import(facts):
    """What took the zygote seconds is there at once. In time computed: any process may be held up."""
    assert facts["import_s"] > 0.3
    assert facts["fork_cpu_s"] < facts["zygote_cpu_s"] / 2


def test_a_fork_is_the_supervisor_s_child(facts):
    """Not the zygote's: the supervisor reaps it and learns how it ended."""
    assert facts["parent_is_us"]
    assert facts["reaped"] == [signal.SIGKILL]


def test_the_store_answers_on_the_supervisor_s_port(facts):
    """Clients find each other's values there."""
    assert facts["value"] == b"value"


def test_a_store_that_died_is_replaced_on_the_very_same_port(facts):
    """The listening socket is the supervisor's, so nobody can take the port meanwhile."""
    assert facts["port_held"]
    assert facts["same_port"]
    assert facts["replaced"]
    assert not facts["keys_of_the_first"]


def test_forks_outlive_their_zygote(facts):
    """A zygote that was killed costs nothing but the next fork."""
    assert facts["store_outlives_zygote"] == b"again"
    assert facts["parent_is_still_us"]


def test_a_store_ends_when_the_supervisor_hangs_up(facts):
    """With success: it is no fault."""
    assert facts["store_exit"] == [0]


def _fork_without_room(me):
    """The process between may be forked, its child may not: the system's limit is reached."""
    real, forks = os.fork, []

    def fork():
        forks.append(1)
        if len(forks) > 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real()

    os.fork = fork
    try:
        return fork_to_supervisor(os.getpid(), lambda: 0)
    except OSError as error:
        return str(error)


def test_a_fork_that_the_system_refuses_yields_no_pid():
    """Certainly not 0, which would signal the supervisor's whole group."""
    (answer,) = run_ranks(_fork_without_room, 1)
    assert answer == "no further process can be forked: a limit on processes is reached"


def _run_two_ranks(me, folder):
    """Ranks to Ready; then what the test commands: a whole run, or nothing more."""
    played = PlayedSupervisor(folder, 2)
    played.until(lambda: played.world.can_fork)
    played.spawn_store()
    for handle in played.world.ranks:
        played.spawn_rank(handle, loads=handle.rank == 0)
    # A rank may be Ready before the zygote's answer that names it has been read.
    played.until(
        lambda: played.count(Ready) == 2 and all(handle.pid for handle in played.world.ranks)
    )
    pids = [handle.pid for handle in played.world.ranks]
    me.say({"zygote": played.zygote_pid, "store": played.store_pid, "ranks": pids})
    command = me.hear()
    assert command == "run"
    parents = [parent_of(pid) for pid in pids]
    said_before = [one.what_it_wrote().before_log for one in played.node.processes.values()]
    for folder_name in ("logs", "checkpoints"):
        (folder / folder_name).mkdir()
    for handle in played.world.ranks:
        handle.machine.advance(RankEvent.GOT_READY)
    played.world.form(1, run_id="a run")
    played.until(lambda: played.count(Finished) == 2)
    played.until(lambda: all(any(e[0] == pid for e in played.ended) for pid in pids))
    codes = [code for pid, code, _ in played.ended if pid in pids]
    return {
        "ours": [parent == os.getpid() for parent in parents],
        "said_before": said_before,
        "formed": played.count(RankFormed),
        "codes": codes,
    }


def test_ranks_train_to_the_end_as_our_children(tmp_path):
    """Forked, formed, finished, exit 0; what they said before there was a log is in it."""
    with ranks(_run_two_ranks, 1, tmp_path) as (supervisor,):
        supervisor.hear()
        supervisor.say("run")
        outcome = supervisor.result()
    assert outcome["ours"] == [True, True]
    assert outcome["formed"] == 2
    assert outcome["codes"] == [0, 0]
    for rank in range(2):
        assert "said before the log exists" in outcome["said_before"][rank]
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")
        assert log.count("said before the log exists") == 1


def test_all_die_with_a_supervisor_that_is_killed(tmp_path):
    """Zygote, store and ranks: SIGKILL leaves no process, and before a generation no file."""
    with ranks(_run_two_ranks, 1, tmp_path) as (supervisor,):
        pids = supervisor.hear()
        every = [pids["zygote"], pids["store"], *pids["ranks"]]
        assert not any(is_gone(pid) for pid in every)
        supervisor.signal(signal.SIGKILL)
        poll(lambda: all(is_gone(pid) for pid in every), what="the end of all")
        assert list(tmp_path.iterdir()) == []


class _Driver:
    """What libcuda answers when it is asked for devices: 3 before it was initialised, 0 afterwards."""

    def __init__(self, answer):
        self._answer = answer

    def cuDeviceGetCount(self, _count):  # noqa: N802 - the driver's name
        return self._answer


def _loaded(answer, modes):
    def load(_library, mode):
        modes.append(mode)
        if answer is None:
            raise OSError("not loaded")
        return _Driver(answer)

    return load


@pytest.mark.parametrize(("answer", "started"), [(None, False), (3, False), (0, True), (100, True)])
def test_a_task_that_has_started_cuda_at_its_import_is_found(monkeypatch, answer, started):
    """torch does not show it; and asking neither loads the driver nor starts it."""
    modes = []
    monkeypatch.setattr(zygote.ctypes, "CDLL", _loaded(answer, modes))
    assert zygote.driver_has_started() is started
    assert all(mode & os.RTLD_NOLOAD for mode in modes)


def test_here_no_driver_has_started():
    """Control: the real question, on a machine without one."""
    assert not zygote.driver_has_started()


@pytest.mark.parametrize("kind", [ForkKind.SPARE, ForkKind.STANDBY, ForkKind.STORE])
def test_a_zygote_without_room_for_a_fork_lives_on_without_helpers(monkeypatch, kind):
    """It says that there is none; without a store no run goes on, so that ends it."""

    def no_room(*given):
        raise OSError("a limit on processes is reached")

    monkeypatch.setattr(zygote, "fork_to_supervisor", no_room)
    monkeypatch.setattr(zygote.parent_death, "set_process_name", lambda name: None)
    ours, theirs = Channel.pair()
    channel = Channel(theirs)
    is_dispensable = kind is not ForkKind.STORE
    spec = NothingMore() if kind is not ForkKind.SPARE else SPARES
    ours.send(Fork(token=7, kind=kind, is_dispensable=is_dispensable, spec=spec))
    if is_dispensable:
        with socket.socket(fileno=os.dup(ours.fileno())) as same:
            same.shutdown(socket.SHUT_WR)
        zygote.serve(channel, os.getpid())
        assert ours.receive()[0] == Forked(token=7, pid=NO_PROCESS)
    else:
        with pytest.raises(OSError, match="a limit"):
            zygote.serve(channel, os.getpid())
    ours.close()
    channel.close()
