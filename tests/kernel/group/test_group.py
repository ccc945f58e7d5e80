"""Forming and leaving a generation on real gloo ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from ddp_runner.kernel.group.group import collectives_begun
from tests.processes import hosted_store, ranks, results, run_ranks

from .joining import held_once_left, join, link_to
from .silent import BACKEND, register


def _exchange(me, port):
    with join(me, port) as group:
        names = group.exchange("name", f"rank {me.rank}")
        again = group.exchange("other", str(me.rank * 2))
        return names, again, group.rank, group.world_size


def test_an_exchange_gives_every_rank_all_values_by_rank():
    """A small agreement needs no collective; different names do not meet."""
    with hosted_store() as port:
        answers = run_ranks(_exchange, 3, port)
    for rank, (names, again, own, size) in enumerate(answers):
        assert names == ["rank 0", "rank 1", "rank 2"]
        assert again == ["0", "2", "4"]
        assert (own, size) == (rank, 3)


def _same_name_in_each_generation(me, port):
    seen = []
    for generation in range(1, 4):
        with join(me, port, generation=generation) as group:
            seen.append(group.exchange("step", f"{generation}.{me.rank}"))
    return seen


def test_a_generation_never_sees_the_values_of_an_earlier_one():
    """On one store, each generation has keys of its own."""
    with hosted_store() as port:
        for seen in run_ranks(_same_name_in_each_generation, 2, port):
            assert seen == [["1.0", "1.1"], ["2.0", "2.1"], ["3.0", "3.1"]]


def _join_together_after_different_pasts(me, port):
    """Rank 0 has formed generations before, rank 1 has not: a replacement beside a survivor."""
    if me.rank == 0:
        for generation in range(1, 4):
            with join(me, port, generation=generation, world_size=1):
                pass
    with join(me, port, generation=4):
        tensor = torch.tensor([me.rank + 1.0])
        dist.all_reduce(tensor)
        return float(tensor)


def test_a_new_process_joins_one_that_has_formed_before():
    """Nothing that a rank went through changes where it looks for its peers."""
    with hosted_store() as port:
        assert run_ranks(_join_together_after_different_pasts, 2, port) == [3.0, 3.0]


def _form_without_faults(me, port, rounds):
    counts = []
    for generation in range(1, rounds + 1):
        with join(me, port, generation=generation) as group:
            group.exchange("here", "")
        counts.append(held_once_left())
    return counts


def test_leaving_without_faults_leaves_nothing_open():
    """Forming and leaving again and again holds no more descriptors or threads than once."""
    with hosted_store() as port:
        for counts in run_ranks(_form_without_faults, 3, port, 15):
            assert counts[-1] == counts[0]


def _wait_for_a_peer(me, port, timeout_s):
    began_s = time.monotonic()
    with pytest.raises((RuntimeError, dist.DistError)):  # noqa: SIM117 - one statement raises
        with join(me, port, timeout_s=timeout_s, world_size=2):
            raise AssertionError("formed without a peer")
    return time.monotonic() - began_s, dist.is_initialized()


def test_a_peer_that_never_comes_ends_the_wait_at_the_timeout():
    """Without anybody to abort, the limit holds by itself."""
    with hosted_store() as port:
        ((took_s, initialized),) = run_ranks(_wait_for_a_peer, 1, port, 0.5)
    assert 0.4 < took_s < 15.0  # the store's own limit is 20 s
    assert not initialized


def _meet_a_dead_store(me, port):
    link_to(port, timeout_s=0.3)
    began_s = time.monotonic()
    with pytest.raises((RuntimeError, dist.DistError)), join(me, port):
        raise AssertionError("formed without a store")
    return time.monotonic() - began_s


def test_a_store_that_is_not_there_ends_the_wait_at_the_timeout():
    """A refused connection is retried, within the limit only."""
    with socket.socket() as nobody:  # who takes the port and does not listen
        nobody.bind(("127.0.0.1", 0))
        assert max(run_ranks(_meet_a_dead_store, 2, nobody.getsockname()[1])) < 15.0


def _outlive_the_store(me, port):
    with join(me, port) as group:
        group.exchange("before", "")
        me.say("formed")
        me.hear()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        with pytest.raises((RuntimeError, dist.DistError)):
            group.exchange("after", "")
        return float(tensor)


def test_collectives_go_on_without_the_store():
    """A store that dies is missed by the next agreement, not by a step."""
    with contextlib.ExitStack() as store, contextlib.ExitStack() as stack:
        port = store.enter_context(hosted_store())
        world = stack.enter_context(ranks(_outlive_the_store, 2, port))
        for process in world:
            process.hear()
        store.close()
        for process in world:
            process.say("go on")
        assert results(world) == [2.0, 2.0]


def _alone(me):
    with join(me, 0) as group:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return group.exchange("a", "b"), tensor.tolist()


def test_a_world_of_one_needs_no_store():
    """Port 0 stands for a store inside the process."""
    assert run_ranks(_alone, 1) == [(["b"], [1.0, 1.0])]


def _several_without_a_store(me):
    with pytest.raises(ValueError, match="store"), join(me, 0):
        raise AssertionError("formed without a store")


def test_a_world_of_several_without_a_store_is_refused():
    """It would wait for peers that can never find it."""
    run_ranks(_several_without_a_store, 2)


def _leave_while_asked(me):
    before, is_in_a_group = collectives_begun(), dist.is_initialized

    def leaves_once_asked():
        answer = is_in_a_group()
        dist.destroy_process_group()
        return answer

    with join(me, 0):
        inside = collectives_begun()
        dist.is_initialized = leaves_once_asked
        while_leaving = collectives_begun()
        dist.is_initialized = is_in_a_group
    return before, inside, while_leaving


def test_a_rank_asked_while_it_leaves_says_that_it_is_outside():
    """Another thread asks: the group may be gone between two of its lines."""
    ((before, inside, while_leaving),) = run_ranks(_leave_while_asked, 1)
    assert (before, while_leaving) == (-1, -1)
    assert inside >= 0


def _leave_by_an_error(me, backend):
    register()
    destroyed, destroy = [], dist.destroy_process_group
    dist.destroy_process_group = lambda: (destroyed.append(True), destroy())
    with contextlib.suppress(KeyError), join(me, 0, backend=backend):
        raise KeyError
    dist.destroy_process_group = destroy
    is_in_a_group = dist.is_initialized()
    with join(me, 0, generation=2, backend=backend) as group:
        return len(destroyed), is_in_a_group, group.world_size


@pytest.mark.parametrize(("backend", "destroyed"), [(BACKEND, 0), ("gloo", 1)])
def test_a_group_of_nccl_is_aborted_where_one_of_gloo_is_destroyed(backend, destroyed):
    """Destroying what a fault has broken may hang there; the next group forms either way."""
    assert run_ranks(_leave_by_an_error, 1, backend) == [(destroyed, not destroyed, 1)]


def _join_by(me, interfaces, backend):
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    with join(me, 0, backend=backend):
        return "joined"


def test_a_network_interface_that_is_not_there_is_named():
    """With those that are; gloo's own error names a line of its source. Control: one that is there."""
    assert run_ranks(_join_by, 1, "lo", "gloo") == ["joined"]
    with pytest.raises(AssertionError) as caught:
        run_ranks(_join_by, 1, "lo,nope0", "gloo")
    said = "BadInputError: GLOO_SOCKET_IFNAME=lo,nope0: nope0 is no network interface here: lo"
    assert said in str(caught.value)
