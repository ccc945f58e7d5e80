"""A state's copy in host memory: what it holds, when, and what it costs."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint import snapshot
from ddp_runner.checkpoint.snapshot import HostMemory, size_in_memory, storage_key

from .states import save


def _state():
    """Tied weights, a view, several types, a buffer, an optimizer that has stepped."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    whole = torch.arange(12.0)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parts": [whole[2:6], (whole.view(3, 4).t(), 7)],
        "half": torch.randn(3).to(torch.bfloat16),
        "empty": torch.zeros(0),
        "words": {"a": None, "b": "text"},
    }
    return model, state


def _bits(value):
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.stride(), value.tolist())
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_bits(item) for item in value)
    return value


def test_a_finished_snapshot_equals_the_state_and_shares_nothing_with_it():
    """Values, types, strides and the names torch hangs on a state dict; other memory."""
    model, state = _state()
    before = _bits(state)
    copied = HostMemory().snapshot(state, steady=model.parameters())
    copied.copy_steady()
    with torch.no_grad():
        for tensor in (*model.state_dict().values(), state["half"], state["parts"][0]):
            tensor.add_(1)
    assert _bits(copied.content) == before
    assert copied.content["model"]._metadata == state["model"]._metadata


def _small_and_large(dtype, *, mark):
    """Tensors below and above what is copied many at once, as they may lie in memory."""

    def made(*shape):
        return (torch.arange(math.prod(shape)).view(shape) % 7 + mark).to(dtype)

    return {
        "zero-dim": made(),
        "matrix": made(3, 5),
        "transposed": made(3, 5).t(),
        "with gaps": made(4, 6)[:, ::2],
        "a part": made(9)[2:5],
        "large": made(40, 1000),
        "empty": made(0),
    }


@pytest.mark.parametrize("is_steady", [True, False])
def test_small_tensors_of_every_type_are_copied_as_large_ones_are(is_steady):
    """Whatever their type and layout, and whatever shares their memory; a second time into the same memory."""
    memory = HostMemory()
    for mark in (0, 1):
        state = {
            str(dtype): _small_and_large(dtype, mark=mark)
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
        }
        state["again"] = {"a view": state["torch.float32"]["matrix"][1:, 2:4]}
        tensors = [one for group in state.values() for one in group.values()]
        copied = memory.snapshot(state, steady=tensors if is_steady else ())
        if is_steady:
            copied.copy_steady()
        before = _bits(state)
        for tensor in tensors:
            tensor.fill_(1 - mark)
        assert _bits(copied.content) == before
        assert size_in_memory(copied.content) == size_in_memory(state)


def test_tensors_that_share_memory_share_it_in_the_copy():
    """Tied weights and views stay one storage: the file does not grow."""
    model, state = _state()
    copied = HostMemory().snapshot(state, steady=model.parameters())
    content = copied.content
    assert storage_key(content["model"]["0.weight"]) == storage_key(content["model"]["2.weight"])
    assert storage_key(content["parts"][0]) == storage_key(content["parts"][1][0])
    assert size_in_memory(content) == size_in_memory(state)


def test_only_steady_tensors_wait_for_their_copy():
    """What is not named as steady is as it was at once; the rest is as it is when copied."""
    model, state = _state()
    copied = HostMemory().snapshot(state, steady=model.parameters())
    with torch.no_grad():
        model[0].weight.fill_(3.0)
        model[1].running_mean.fill_(9.0)
    copied.copy_steady()
    assert (copied.content["model"]["0.weight"] == 3.0).all()
    assert not (copied.content["model"]["1.running_mean"] == 9.0).any()


def test_the_same_memory_serves_every_snapshot():
    """However many saves: one copy. A state of another size takes other memory, still one copy."""
    model, state = _state()
    memory = HostMemory()
    first = memory.snapshot(state, steady=model.parameters()).content["model"]["0.weight"]
    held = memory.size_bytes
    for _ in range(3):
        again = memory.snapshot(state, steady=model.parameters()).content["model"]["0.weight"]
        assert again.data_ptr() == first.data_ptr()
    assert memory.size_bytes == held == size_in_memory(state)
    memory.snapshot({"one": torch.zeros(2)}, steady=())
    assert memory.size_bytes == 8


def test_what_cannot_be_read_again_is_left_for_the_store_to_refuse(tmp_path):
    """A snapshot hides no value that a load would refuse."""
    copied = HostMemory().snapshot({"model": {"odd": {1, 2}}}, steady=())
    with pytest.raises(TypeError, match="set"):
        save(tmp_path, 1, state=copied.content)


@pytest.mark.gpu
def test_a_snapshot_of_a_device_is_of_its_moment():
    """Kernels that were queued before count, those after the copy do not."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    weight = torch.zeros(4_000_000, device="cuda")
    buffer = torch.zeros(1000, device="cuda")
    memory = HostMemory()
    for count in range(1, 4):
        for _ in range(50):
            weight.add_(1.0)
        buffer.fill_(count)
        state = {"weight": weight, "buffer": buffer, "step": torch.tensor(float(count))}
        copied = memory.snapshot(state, steady=[weight])
        buffer.fill_(-1.0)
        copied.copy_steady()
        weight.mul_(1.0)
        content = copied.content
        assert content["weight"].device.type == "cpu"
        assert content["weight"].unique().tolist() == [50.0 * count]
        assert content["buffer"].unique().tolist() == [float(count)]
        assert content["weight"].is_pinned()


def test_room_that_was_made_ahead_serves_the_first_snapshot(monkeypatch):
    """Made in a thread and waited for by whoever needs it: the copy takes no memory of its own."""
    monkeypatch.setattr(snapshot, "can_pin", lambda: False)
    made, may_make, real = [], threading.Event(), snapshot._room

    def slowly(size_bytes, *, pinned):
        may_make.wait(30)
        made.append(threading.current_thread().name)
        return real(size_bytes, pinned=pinned)

    monkeypatch.setattr(snapshot, "_room", slowly)
    model, state = _state()
    memory = HostMemory()
    memory.reserve(snapshot.storage_sizes(state))
    memory.reserve(snapshot.storage_sizes(state))  # once is enough
    assert made == []
    may_make.set()
    copied = memory.snapshot(state, steady=model.parameters())
    copied.copy_steady()
    assert _bits(copied.content) == _bits(state)
    assert set(made) == {"checkpoint-memory"}
    assert memory.size_bytes == size_in_memory(state)


def test_where_no_room_can_be_made_ahead_the_first_snapshot_tries_again(monkeypatch):
    """The thread's failure is nobody's: whoever copies meets it, or finds room by then."""
    model, state = _state()
    memory, real = HostMemory(), snapshot._room

    def refuses(size_bytes, *, pinned):
        raise RuntimeError("no memory")

    monkeypatch.setattr(snapshot, "_room", refuses)
    memory.reserve(snapshot.storage_sizes(state))
    assert memory.size_bytes == 0
    with pytest.raises(RuntimeError, match="no memory"):
        memory.snapshot(state, steady=())
    monkeypatch.setattr(snapshot, "_room", real)
    memory.snapshot(state, steady=model.parameters())
    assert memory.size_bytes == size_in_memory(state)
