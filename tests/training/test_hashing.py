"""A state hashed beside the next step: of one boundary, and of what is written of it."""

from __future__ import annotations

import threading

import pytest
import torch

from ddp_runner.checkpoint.snapshot import HostMemory
from ddp_runner.training.components.tensor_hash import state_hashes
from ddp_runner.training.exactness.state_hashes import StateHashing
from tests.training.building import build_state

GIVE_UP_S = 30.0


def _state():
    """With an optimizer that has stepped, an average, and buffers."""
    state = build_state()
    state.model(torch.randn(8, 6)).sum().backward()
    state.optimizer.step()
    state.ema.update(state.model)
    state.buffers.keep()
    return state


def _themselves(tensors):
    return tensors


def _flip(tensor):
    tensor.view(torch.int32).view(-1)[3] ^= 1 << 20


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "state-hash"]


def test_what_forward_changes_meanwhile_is_hashed_as_it_was():
    """The next step has run forward and backward before the thread begins: the hashes are the same."""
    state, gate = _state(), threading.Event()
    expected = state_hashes(state.replicated())

    def late(tensors):
        assert gate.wait(GIVE_UP_S)
        return tensors

    hashing = StateHashing(state, source=late)
    before = [buffer.clone() for buffer in state.buffers.live()]
    state.model(torch.randn(8, 6)).sum().backward()
    assert any(not torch.equal(a, b) for a, b in zip(before, state.buffers.live(), strict=True))
    gate.set()
    assert hashing.result() == expected
    assert list(hashing.result()) == list(expected)


def test_of_a_save_the_copy_is_hashed():
    """A bit that flips where it is copied to shows; one that flips in the weights after that does not."""
    for flips_in_copy in (True, False):
        state = _state()
        expected = state_hashes(state.replicated())
        snapshot = HostMemory().snapshot(state.capture(), steady=state.steady_tensors())
        snapshot.copy_steady()
        live = state.model[3].weight.detach()
        _flip(snapshot.copy_of(live) if flips_in_copy else live)
        hashing = StateHashing(
            state,
            source=lambda tensors, copied=snapshot: {
                name: copied.copy_of(tensor) for name, tensor in tensors.items()
            },
        )
        odd = [name for name, value in hashing.result().items() if value != expected[name]]
        assert odd == (["3.weight"] if flips_in_copy else [])


def test_every_part_that_a_step_changes_is_in_the_hashes():
    """Weights, what the optimizer remembers, average and buffers: one bit of each shows."""
    state = _state()
    expected = StateHashing(state, source=_themselves).result()
    parameter = state.model[3].weight
    for tensor in (
        parameter.detach(),
        state.optimizer.state[parameter]["exp_avg"],
        state.ema.averages()[0],
        state.buffers.live()[0],
    ):
        _flip(tensor)
        assert StateHashing(state, source=_themselves).result() != expected
        _flip(tensor)
    assert StateHashing(state, source=_themselves).result() == expected


def test_nobody_waits_for_a_hash_that_is_dropped():
    """Its thread ends before it has looked at what may be changing by then."""
    state, gate, looked = _state(), threading.Event(), []

    class Looked(dict):
        def items(self):
            for name, tensor in super().items():
                looked.append(name)
                yield name, tensor

    def late(tensors):
        assert gate.wait(GIVE_UP_S)
        return Looked(tensors)

    others = _threads()  # which have given their result, and are about to end
    hashing = StateHashing(state, source=late)
    (thread,) = [thread for thread in _threads() if thread not in others]
    hashing.drop()
    gate.set()
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()
    assert len(looked) == 1, "the rest of the state was hashed all the same"


def test_without_a_thread_the_state_is_hashed_at_once(monkeypatch):
    """A machine that gives no more threads costs time, not the run."""
    state = _state()
    expected = state_hashes(state.replicated())

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    hashing = StateHashing(state, source=_themselves)
    _flip(state.model[3].weight.detach())
    assert hashing.result() == expected


def test_what_fails_in_the_thread_is_raised_where_the_verdict_is_awaited():
    """A hash that could not be taken is no good verdict."""

    def broken(tensors):
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        StateHashing(_state(), source=broken).result()
