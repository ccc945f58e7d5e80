"""The abort of communicators that end in silence, on ranks whose group is aborted as NCCL is."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ddp_runner.kernel.group import communicators
from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.communicators import Communicators
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from tests.processes import hosted_store, poll, ranks, results, run_ranks

from .joining import join
from .silent import BACKEND, SilentGroup, register

CPU = torch.device("cpu")


def _join(me, port, **options):
    register()
    return join(me, port, backend=BACKEND, **options)


def _summed(group, value):
    tensor = torch.full((4,), float(value))
    group.all_reduce(tensor)
    return tensor.unique().tolist()


def _sum_and_leave(me, port):
    with _join(me, port) as group:
        return _summed(group, me.rank + 1)


def test_without_faults_the_silent_group_sums():
    """Control: what the tests here take for NCCL computes what gloo does."""
    with hosted_store() as port:
        assert run_ranks(_sum_and_leave, 3, port) == [[6.0]] * 3


def _wait_for_one_that_never_comes(me, port):
    """Ranks 0 and 1 sum; rank 2 never does. Rank 0 alone aborts its communicators."""
    switch = AbortSwitch()
    outcome = []
    with contextlib.suppress(ConnectionError), _join(me, port, switch=switch) as group:
        if me.rank == 2:
            me.say("there")
            me.hear()
            raise ConnectionError("left")
        threading.Thread(target=_abort_when_asked, args=(me, group), daemon=True).start()
        outcome += _summed(group, me.rank + 1)
        switch.trip()
        group.confirm()
    return outcome


def _abort_when_asked(me, group):
    me.say("there")
    me.hear()
    if me.rank == 0:
        group._communicators.abort()


def test_one_rank_s_abort_ends_its_peer_s_sum_with_wrong_numbers():
    """Control: the danger is there. Who had committed what rank 1 got would have lost the run."""
    with hosted_store() as port, ranks(_wait_for_one_that_never_comes, 3, port) as world:
        for process in world:
            process.hear()
        for process in world:
            process.say("go")
        answers = results(world)
    ends, right = [bool(answer) for answer in answers], [6.0]
    assert ends == [True, True, False]
    assert right not in answers


def _blocked(me, port):
    """All but rank 2 wait in a sum; each is aborted in two phases, when it is asked to."""
    switch = AbortSwitch()
    committed = []

    def obey():
        while True:
            act = me.hear()
            getattr(switch, act)()
            me.say((act, len(committed)))

    with contextlib.suppress(OSError, RuntimeError), _join(me, port, switch=switch) as group:
        me.say("formed")
        threading.Thread(target=obey, daemon=True).start()
        if me.rank == 2:
            poll(lambda: switch.tripped, what="the abort")
            raise RuntimeError("it never came to the sum")
        _summed(group, 1)
        group.confirm()
        committed.append(1)
    with _join(me, port, generation=2) as group:
        return committed, _summed(group, me.rank + 1)


def test_a_rank_that_has_heard_an_abort_commits_nothing_after_it():
    """And is freed by the second act alone; the next generation forms and sums rightly."""
    with hosted_store() as port, ranks(_blocked, 3, port) as world:
        for process in world:
            assert process.hear() == "formed"
        for act in ("trip", "cut"):
            for process in world:
                process.say(act)
            for process in world:
                assert process.hear() == (act, 0)
        assert results(world) == [([], [6.0])] * 3


def _abort_takes_long(me, port, abort_s, waited_s):
    """The listener's thread cuts, and must be free again at once; the next generation waits for it."""
    SilentGroup.abort_s = abort_s
    communicators.ABORT_TIMEOUT_S = waited_s
    switch = AbortSwitch()
    with pytest.raises(RuntimeError), _join(me, port, switch=switch):
        raise RuntimeError("a step went wrong")
    switch.trip()
    began_s = time.monotonic()
    switch.cut()
    cut_s = time.monotonic() - began_s
    try:
        with _join(me, port, generation=2) as group:
            took_s = time.monotonic() - began_s
            return cut_s < abort_s / 2, took_s >= abort_s, _summed(group, 1)
    except FaultError as error:
        return cut_s < abort_s / 2, error.fault.kind


def test_the_next_generation_waits_until_the_last_one_is_aborted():
    """Who cuts waits for nothing: it hears what the supervisor says meanwhile."""
    with hosted_store() as port:
        assert run_ranks(_abort_takes_long, 2, port, 1.0, 30.0) == [(True, True, [2.0])] * 2


def test_a_device_that_keeps_hold_of_the_last_generation_is_lost():
    """There is no forming over a kernel that may still write."""
    with hosted_store() as port:
        answers = run_ranks(_abort_takes_long, 2, port, 60.0, 0.2)
    assert answers == [(True, FaultKind.DEVICE_LOST)] * 2


class _Backend:
    """Notes who is inside while it is aborted."""

    def __init__(self):
        self.inside = 0
        self.inside_at_abort = []

    def _get_backend(self, device):
        del device
        return self

    def abort(self):
        self.inside_at_abort.append(self.inside)


def test_nothing_is_enqueued_while_communicators_are_aborted():
    """The aborter waits for a thread that is inside; afterwards nobody gets in."""
    backend, switch = _Backend(), AbortSwitch()
    ours = Communicators(backend, switch, CPU)
    is_in, may_leave = threading.Event(), threading.Event()

    def enqueue():
        with ours.entered():
            backend.inside = 1
            is_in.set()
            may_leave.wait()
            backend.inside = 0

    thread = threading.Thread(target=enqueue)
    thread.start()
    is_in.wait()
    switch.trip()
    switch.cut()
    assert backend.inside_at_abort == []
    may_leave.set()
    thread.join()
    assert ours.await_aborted() == ""
    assert backend.inside_at_abort == [0]
    with pytest.raises(ConnectionError), ours.entered():
        pass


def test_an_abort_does_not_wait_forever_for_a_stuck_thread(monkeypatch):
    """A call that blocks in the driver is what the abort is to end."""
    monkeypatch.setattr(communicators, "INSIDE_TIMEOUT_S", 0.05)
    backend, switch = _Backend(), AbortSwitch()
    ours = Communicators(backend, switch, CPU)
    with ours.entered():
        switch.trip()
        switch.cut()
        assert ours.await_aborted() == ""


def test_an_abort_that_fails_is_reported_to_who_waits_for_it(capfd):
    """It is nobody's own error: the thread lives on, and the next generation does not form."""
    backend, switch = _Backend(), AbortSwitch()
    backend.abort = lambda: 1 / 0
    ours = Communicators(backend, switch, CPU)
    switch.cut()
    assert ours.await_aborted() == "aborting the communicators failed: division by zero"
    assert "ZeroDivisionError" in capfd.readouterr().err


def _leave_after_the_world_was_cleared(me, port):
    """Somebody's abort of torch's whole world comes before the rank leaves by its own error."""
    try:
        with join(me, port):
            dist.distributed_c10d._abort_process_group()
            raise KeyError("its own error")  # noqa: TRY301 - as a step would
    except Exception as error:  # noqa: BLE001 - whatever comes out
        return repr(error)


def test_leaving_never_replaces_the_error_for_which_a_rank_leaves():
    """Else a survivor would seem to be the culprit."""
    with hosted_store() as port:
        assert (
            run_ranks(_leave_after_the_world_was_cleared, 2, port)
            == ["KeyError('its own error')"] * 2
        )


def _fail_alone_and_go_on(me):
    register()
    with pytest.raises(KeyError), join(me, 0, backend=BACKEND, world_size=1):
        raise KeyError("a step went wrong")
    began_s = time.monotonic()
    with join(me, 0, backend=BACKEND, world_size=1, generation=2) as group:
        return _summed(group, 2), time.monotonic() - began_s < communicators.ABORT_TIMEOUT_S / 2


def test_a_process_alone_goes_on_after_an_error_as_in_a_notebook():
    """No supervisor says there when communicators may be aborted, and no peer could be misled."""
    assert run_ranks(_fail_alone_and_go_on, 1) == [([2.0], True)]
