"""The abort switch on real gloo ranks: whatever a rank waits for, another thread can free it."""

from __future__ import annotations

import contextlib
import signal
import socket
import statistics
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.sockets import address_of_peer
from tests.processes import host_store, hosted_store, poll, ranks, results, run_ranks

from .joining import freed_after_s, held, held_once_left, is_stopped, join, trip_when_asked
from .stalling import form_and_stop

# Far below every timeout of these tests, so that only an abort can be what freed a rank. How soon it
# does is the median of many: a busy machine may hold up any single one.
FREED_WITHIN_S = 12.0
FREED_WITHIN_MEDIAN_S = 0.5
ROUNDS = 20


def _say_formed_and_sum(me):
    me.say("formed")
    _summed(1)


def _summed(value):
    tensor = torch.full((1000,), float(value))
    dist.all_reduce(tensor)
    return tensor.unique().tolist()


def _blocked_then_aborted(me, port, generation):
    """All-reduce once; then rank 0 alone begins another, which nobody joins."""
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch)
    sums = []

    def begin_one_that_nobody_joins():
        sums.extend(_summed(me.rank + 1))
        me.say("formed")
        if me.rank == 0:
            _summed(1)
        poll(lambda: switch.tripped, what="the abort")
        raise RuntimeError("the others leave by an error of their own")

    with pytest.raises(RuntimeError), join(me, port, generation=generation, switch=switch):
        begin_one_that_nobody_joins()
    return sums, freed_after_s(moments)


def _rounds_of_aborts(me, port):
    counts, freed_s = [], []
    for generation in range(1, ROUNDS + 2):
        sums, took_s = _blocked_then_aborted(me, port, generation)
        assert sums == [3.0]
        freed_s.append(took_s)
        counts.append(held_once_left())
    with join(me, port, generation=ROUNDS + 2):
        last = _summed(me.rank + 1)
    return counts, freed_s, last


def test_a_blocked_all_reduce_is_freed_and_the_next_group_forms():
    """Tripped from another thread it raises at once; so often as one likes, nothing piles up."""
    with hosted_store() as port, ranks(_rounds_of_aborts, 2, port) as world:
        for _ in range(ROUNDS + 1):
            for process in world:
                assert process.hear() == "formed"
            world[0].say("trip")
            world[1].say("trip")
        for counts, freed_s, last in results(world):
            assert last == [3.0]
            assert statistics.median(freed_s) < FREED_WITHIN_MEDIAN_S
            assert max(freed_s) < FREED_WITHIN_S
            assert counts[-1] == counts[0]


def _freed_alone(me, port):
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch)
    with pytest.raises(RuntimeError), join(me, port, switch=switch):
        _say_formed_and_sum(me)
    return freed_after_s(moments)


def _stays_in_the_group(me, port):
    if me.rank == 0:
        return _freed_alone(me, port)
    with join(me, port):
        me.say("formed")
        return me.hear()


def test_a_rank_is_freed_by_its_own_switch_while_its_peer_stays():
    """The abort needs nothing of the peer: it may be stopped, or busy in user code."""
    with hosted_store() as port, ranks(_stays_in_the_group, 2, port) as world:
        for process in world:
            process.hear()
        world[1].signal(signal.SIGSTOP)
        world[0].say("trip")
        assert world[0].result() < FREED_WITHIN_S
        world[1].signal(signal.SIGCONT)
        world[1].say("end")
        assert world[1].result() == "end"


def _ask_a_peer_that_never_answers(me, port, secret):
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch)

    def ask():
        me.say("formed")
        if me.rank == 0:
            return group.exchange("here", "")
        poll(lambda: switch.tripped, what="the abort")
        raise RuntimeError("it leaves without an answer")

    with (
        pytest.raises(RuntimeError),
        join(me, port, switch=switch, secret=secret) as group,
    ):
        ask()
    freed_s = freed_after_s(moments)
    with join(me, port, generation=2, secret=secret) as group:
        return freed_s, group.exchange("here", str(me.rank))


@pytest.mark.parametrize("secret", ["of these ranks alone", ""], ids=["signed", "plain"])
def test_a_rank_that_waits_for_answers_is_freed(secret):
    """A peer that never answers holds nobody, and the store serves the next generation."""
    with (
        hosted_store() as port,
        ranks(_ask_a_peer_that_never_answers, 2, port, secret) as world,
    ):
        for process in world:
            assert process.hear() == "formed"
        poll(lambda: _is_asleep(world[0]), what="the wait")
        for process in world:
            process.say("trip")
        for freed_s, answers in results(world):
            assert freed_s < FREED_WITHIN_S
            assert answers == ["0", "1"]


def _ask_and_be_held_up(me, port):
    """Rank 0 has answered, and reads only once it is told to leave; rank 1 reads at once."""
    switch = AbortSwitch()
    if me.rank == 1:
        with join(me, port, switch=switch) as group:
            me.say(group.exchange("here", "1"))
            return me.hear()
    trip_when_asked(me, switch)

    def ask(group):
        read = group._store.multi_get

        def held_up(keys):
            me.say("answered")
            poll(lambda: switch.tripped, what="the abort")
            return read(keys)

        group._store.multi_get = held_up
        found.extend(group.exchange("here", "0"))
        group.exchange("next", "0")

    found = []
    with (
        pytest.raises((RuntimeError, ConnectionError)),
        join(me, port, switch=switch) as group,
    ):
        ask(group)
    return found


def test_answers_that_a_lost_peer_has_read_are_read_after_the_abort():
    """It may have committed the step by them, as a save makes sure of; the rank that is left has to commit it too."""
    with hosted_store() as port, ranks(_ask_and_be_held_up, 2, port) as (here, peer):
        assert here.hear() == "answered"
        assert peer.hear() == ["0", "1"]
        peer.signal(signal.SIGKILL)
        here.say("trip")
        assert here.result() == ["0", "1"]


def _receive_behind_a_failed_operation(me, port):
    if me.rank == 1:
        with join(me, port):
            me.hear()
            dist.send(torch.ones(1), 0, tag=1)
            me.say("sent")
            return me.hear()
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch)

    def receive_for_ever():
        failed = dist.irecv(torch.empty(1), 1, tag=1)
        del failed  # its message comes all the same, and is in the way of all that follow
        me.say("waiting")
        dist.recv(torch.empty(1), 1, tag=2)

    with pytest.raises(RuntimeError), join(me, port, switch=switch):
        receive_for_ever()
    return freed_after_s(moments)


def test_an_operation_behind_the_message_of_a_failed_one_is_freed():
    """gloo reads nothing more from such a connection, not even its end."""
    with hosted_store() as port, ranks(_receive_behind_a_failed_operation, 2, port) as world:
        assert world[0].hear() == "waiting"
        world[1].say("send")
        assert world[1].hear() == "sent"
        world[0].say("trip")
        assert world[0].result() < FREED_WITHIN_S
        world[1].say("end")
        assert world[1].result() == "end"


def _all_reduce_until_freed(me, port):
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch)

    def sum_for_ever():
        me.say("formed")
        while True:
            _summed(1)

    with pytest.raises(RuntimeError), join(me, port, switch=switch):
        sum_for_ever()
    freed_s = freed_after_s(moments)
    with join(me, port, generation=2, world_size=me.world_size - 1):
        return freed_s, _summed(me.rank + 1)


def test_a_rank_killed_inside_an_all_reduce_frees_the_others():
    """Once they trip, survivors of a SIGKILL leave at once and form the next generation."""
    with hosted_store() as port, ranks(_all_reduce_until_freed, 4, port) as world:
        for process in world:
            process.hear()
        world[3].signal(signal.SIGKILL)
        for process in world[:3]:
            process.say("trip")
        for freed_s, sums in results(world[:3]):
            assert freed_s < FREED_WITHIN_S
            assert sums == [6.0]


def _join_a_world_that_is_not_complete(me, port):
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch)
    me.say("forming")
    with (
        pytest.raises((RuntimeError, ConnectionError)),
        join(me, port, switch=switch, world_size=me.world_size + 1),
    ):
        raise AssertionError("formed without its last rank")
    freed_s = freed_after_s(moments)
    with join(me, port, generation=2):
        return freed_s, _summed(me.rank + 1)


def _waits_for_the_store(process):
    """Whether the process's forming thread sleeps in a read from the store's connection."""
    return len(psutil.Process(process.pid).net_connections(kind="tcp")) >= 2


def test_a_peer_that_never_comes_does_not_hold_the_others():
    """Tripped while it waits in the store for a peer's address, a rank leaves at once."""
    with hosted_store() as port, ranks(_join_a_world_that_is_not_complete, 2, port) as world:
        for process in world:
            process.hear()
        for process in world:
            poll(lambda process=process: _waits_for_the_store(process), what="the store wait")
        # Not one before the other has come: it would find its peer gone, and not wait.
        for process in world:
            process.say("trip")
        for freed_s, sums in results(world):
            assert freed_s < FREED_WITHIN_S
            assert sums == [3.0]


def _form_with_one_that_stops(me, port, stop_at):
    if me.rank == me.world_size - 1:
        form_and_stop(me, port, stop_at=stop_at)
        raise AssertionError("was to stop while forming")
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch)
    me.say("forming")
    with (
        pytest.raises((RuntimeError, ConnectionError)),
        join(me, port, switch=switch, timeout_s=15.0),
    ):
        _say_formed_and_sum(me)  # it may have nothing left to wait for: then the all-reduce has
    freed_s = freed_after_s(moments)
    with join(me, port, generation=2, world_size=me.world_size - 1):
        return freed_s, _summed(me.rank + 1)


def _result_after_talk(process):
    value = process.hear_any()
    return process.hear_any() if value == "formed" else value


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_peer_that_stops_while_connecting_does_not_hold_the_others(stop_at):
    """At whichever store operation a peer stops, those who connect to it leave when tripped.

    gloo picks by port number which side of a pair waits to be called, so both come up in the row. The
    last one stops when it is connected, and has not shown who it is.
    """
    with (
        hosted_store() as port,
        ranks(_form_with_one_that_stops, 3, port, stop_at) as world,
    ):
        poll(lambda: is_stopped(world[2]), what="the stop")
        for process in world[:2]:
            process.hear()
            process.say("trip")
        for process in world[:2]:
            freed_s, sums = _result_after_talk(process)
            assert freed_s < FREED_WITHIN_S
            assert sums == [3.0]


def _join_with_a_store_that_is_stopped(me, port):
    with join(me, port) as group:  # connects, as a rank does before it is Ready
        group.exchange("here", "")
    me.say("connected")
    me.hear()
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch)
    me.say("forming")
    with (
        pytest.raises((RuntimeError, ConnectionError)),
        join(me, port, generation=2, switch=switch),
    ):
        raise AssertionError("formed without a store")
    return freed_after_s(moments)


def test_a_store_that_is_stuck_does_not_hold_a_rank_that_forms():
    """Even the first question to the store is left at once when tripped."""
    with ranks(host_store, 1) as (host,):
        port = host.hear()
        with ranks(_join_with_a_store_that_is_stopped, 2, port) as world:
            for process in world:
                process.hear()
            host.signal(signal.SIGSTOP)
            poll(lambda: is_stopped(host), what="the stop")  # all of its threads
            for process in world:
                process.say("go on")
                process.hear()
                poll(lambda process=process: _is_asleep(process), what="the wait")
                process.say("trip")
            assert max(results(world)) < FREED_WITHIN_S


def _is_asleep(process):
    return psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING


@pytest.mark.parametrize("abort_comes_first", [True, False])
def test_an_abort_after_an_error_of_ones_own_is_not_its_cause(abort_comes_first):
    """The peers see this rank hang up, and the supervisor aborts, before the error has been reported."""
    switch = AbortSwitch()
    assert not switch.aborted
    acts = [switch.trip, switch.release]
    for act in acts if abort_comes_first else acts[::-1]:
        act()
    assert switch.tripped
    assert switch.aborted is abort_comes_first


def _join_when_tripped_already(me, port):
    switch = AbortSwitch()
    switch.trip()
    began_s = time.monotonic()
    with pytest.raises((RuntimeError, ConnectionError)), join(me, port, switch=switch):
        raise AssertionError("formed although it was aborted before")
    return time.monotonic() - began_s, dist.is_initialized(), held_once_left()


def test_a_generation_aborted_before_it_was_joined_is_not_joined():
    """An abort that comes first is not forgotten; nothing of the group is left."""
    with hosted_store() as port:
        for took_s, initialized, (descriptors, threads) in run_ranks(
            _join_when_tripped_already, 2, port
        ):
            assert took_s < FREED_WITHIN_S
            assert not initialized
            assert threads == 1
            assert descriptors < 12


def _leaves_without_faults(me, port):
    switch = AbortSwitch()
    with join(me, port, switch=switch):
        sums = _summed(1)
    switch.trip()  # comes too late: a closed switch does nothing
    return sums, switch.tripped, held()


def test_a_generation_without_faults_is_left_without_an_abort():
    """Control: nothing trips by itself, and an abort of a generation that was left is ignored."""
    with hosted_store() as port:
        for sums, tripped, _ in run_ranks(_leaves_without_faults, 3, port):
            assert sums == [3.0]
            assert not tripped


def _raises_while_others_reduce(me, port):
    switch = AbortSwitch()
    if me.rank == 0:
        with pytest.raises(ZeroDivisionError), join(me, port, switch=switch):
            _say_formed_and_raise_when_asked(me)
        return 0.0
    with pytest.raises(RuntimeError), join(me, port, switch=switch):
        _say_formed_and_sum(me)
    return 1.0


def _say_formed_and_raise_when_asked(me):
    me.say("formed")
    me.hear()
    raise ZeroDivisionError


def test_a_rank_that_leaves_by_an_error_frees_its_peers():
    """Peers in a collective that it will never enter see it go, without any timeout."""
    with hosted_store() as port, ranks(_raises_while_others_reduce, 3, port) as world:
        for process in world:
            process.hear()
        began_s = time.monotonic()
        world[0].say("raise")
        assert results(world) == [0.0, 1.0, 1.0]
        assert time.monotonic() - began_s < FREED_WITHIN_S


def test_hooks_run_once_and_a_late_hook_at_once():
    """``trip`` calls each hook exactly once; one that is added afterwards is called on the spot."""
    switch = AbortSwitch()
    called = []
    switch.on_trip(lambda: called.append("early"))
    switch.trip()
    switch.trip()
    switch.on_trip(lambda: called.append("late"))
    assert called == ["early", "late"]


def test_only_connections_made_inside_the_block_are_shut_down():
    """Sockets from before, listening ones and local ones (the control channel) are left alone."""
    switch = AbortSwitch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = socket.create_connection(server.getsockname())
        before_peer, _ = server.accept()
        with switch.watch_new_sockets(peers=1):
            inside = socket.create_connection(server.getsockname())
            inside_peer, _ = server.accept()
            listening = socket.create_server(("127.0.0.1", 0))
            left, right = socket.socketpair()
        switch.trip()
        with before, before_peer, inside, inside_peer, listening, left, right:
            inside.settimeout(10)
            assert inside.recv(1) == b""
            before.sendall(b"x")
            assert before_peer.recv(1) == b"x"
            left.sendall(b"x")
            assert right.recv(1) == b"x"
            with socket.create_connection(listening.getsockname()):
                listening.accept()[0].close()
        switch.close()


def test_a_connection_made_during_the_block_is_shut_down_with_it():
    """Tripped meanwhile, the block need not end first: what blocks in it is freed."""
    switch = AbortSwitch()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        switch.watch_new_sockets(peers=1),
        socket.create_connection(server.getsockname()) as inside,
    ):
        threading.Thread(target=switch.trip).start()
        inside.settimeout(10)
        assert inside.recv(1) == b""
    switch.close()


def test_many_threads_may_trip_one_switch():
    """The listener thread and a failing rank may both do it; hooks still run once."""
    switch = AbortSwitch()
    called = []
    switch.on_trip(lambda: called.append(1))
    start = threading.Barrier(8)

    def trip():
        start.wait()
        switch.trip()

    threads = [threading.Thread(target=trip) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert called == [1]


def test_the_store_is_distinguished_from_another_machine_s_same_port():
    """By address and port: an abort hangs up on that peer, and leaves the store's connection alone."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = store.getsockname()[1]
        # Another address of this machine stands for another machine.
        peer = stack.enter_context(socket.create_server(("127.0.0.2", port)))
        switch = AbortSwitch()
        to_store = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with switch.watch_new_sockets(peers=0):
            to_peer = stack.enter_context(socket.create_connection(("127.0.0.2", port)))
        switch.watch_store({("127.0.0.1", port)})
        at_store = stack.enter_context(store.accept()[0])
        stack.enter_context(peer.accept()[0])
        switch.trip()
        to_peer.settimeout(20.0)
        at_store.sendall(b"x")
        assert to_peer.recv(1) == b"", "the peer's is shut"
        assert to_store.recv(1) == b"x", "the store's is not: nobody waits there"
        switch.close()


def test_an_address_has_one_form_whatever_the_socket():
    """An IPv4 peer that is seen through an IPv6 socket is the same peer."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_INET6))
        try:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind(("::", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        server.listen()
        port = server.getsockname()[1]
        plain = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        mapped = stack.enter_context(socket.socket(socket.AF_INET6))
        mapped.connect(("::ffff:127.0.0.1", port))
        accepted = stack.enter_context(server.accept()[0])
        assert mapped.getpeername()[0] == "::ffff:127.0.0.1", "else this proves nothing"
        assert address_of_peer(plain) == address_of_peer(mapped) == ("127.0.0.1", port)
        assert address_of_peer(accepted) == ("127.0.0.1", plain.getsockname()[1])
        plain.close()
        with socket.socket() as unconnected:
            assert address_of_peer(unconnected) is None
