"""Copies in memory that outlive their maker: whole or none, whenever it is killed, and never another's bytes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.snapshot import HostMemory

from .states import facts_of

NUMBERS = 200_000


@pytest.fixture
def files():
    """Two memory files without a name, as a supervisor has them."""
    found = [os.memfd_create(f"slot{number}") for number in (0, 1)]
    yield found
    for one in found:
        os.close(one)


def slots_on(files):
    return MemorySlots(files)


def keep(slots, memory, step, state):
    """Make a copy of ``state``, to its end."""
    made = memory.snapshot(state, steady=[])
    made.copy_steady()
    return slots.seal(made.content, facts_of(step))


def numbered(step, *, count=NUMBERS):
    """A state that shows its step in each byte; without torch, whose threads no fork has."""
    return {
        "model": {"weight": torch.from_numpy(np.full(count, float(step), np.float32))},
        "at": step,
    }


def usual_state():
    """Tied weights, a view, an optimizer that has stepped, and what has no place of its own."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return model, {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parts": [torch.arange(12.0).view(3, 4).t()[1:], torch.eye(3).to_sparse()],
        "half": torch.randn(3).to(torch.bfloat16),
        "empty": torch.zeros(0),
        "words": {"a": None, "b": ("text", 2**70)},
    }


def as_plain(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.layout, tuple(value.shape), value.to_dense().tolist()
    if isinstance(value, dict):
        return {key: as_plain(one) for key, one in value.items()}
    return [as_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def test_anothers_copy_is_the_state_and_nothing_of_it_is_shared(files):
    """As its maker left it: tied weights are tied, and a later copy in the same memory changes nothing."""
    slots = slots_on(files)
    memory = HostMemory(slots)
    model, state = usual_state()
    before = as_plain(state)
    made = memory.snapshot(state, steady=model.parameters())
    made.copy_steady()
    slots.seal(made.content, facts_of(3))
    found, _ = slots_on(files).load()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    for step in (4, 5):
        keep(slots, memory, step, model.state_dict())
    assert as_plain(found.state) == before
    assert found.manifest.step == 3
    weights = found.state["model"]
    assert weights["0.weight"].data_ptr() == weights["2.weight"].data_ptr()
    assert weights._metadata == state["model"]._metadata


def test_the_newest_whole_copy_is_found_whatever_its_size(files):
    """They take turns; the state may grow, and shrink; without any there is nothing."""
    slots = slots_on(files)
    memory = HostMemory(slots)
    assert (slots.newest_step, slots.load()) == (None, (None, []))
    for step, count in ((1, 100), (2, 5_000), (3, 7), (4, 7), (5, 0)):
        keep(slots, memory, step, numbered(step, count=count))
        found, _ = slots_on(files).load()
        assert (found.manifest.step, found.state["at"]) == (step, step)
        assert found.state["model"]["weight"].tolist() == [float(step)] * count
    slots.clear()
    assert (slots_on(files).newest_step, slots_on(files).load()) == (None, (None, []))


def _copy_for_ever(files, ready):
    slots = slots_on(files)
    memory = HostMemory(slots)
    step = slots.newest_step or 0
    while True:
        step += 1
        keep(slots, memory, step, numbered(step))
        ready.set()


def test_a_copy_that_is_cut_short_leaves_the_other_one(files):
    """Its maker is killed at any moment, 25 times: there is always a whole one, and each goes on from it."""
    context, newest = multiprocessing.get_context("fork"), 0
    for number in range(25):
        ready = context.Event()
        maker = context.Process(target=_copy_for_ever, args=(files, ready))
        maker.start()
        assert ready.wait(30)
        time.sleep(number * 0.0004)
        os.kill(maker.pid, signal.SIGKILL)
        maker.join()
        found, wrong = slots_on(files).load()
        step = found.manifest.step
        assert step > newest
        assert found.state["at"] == step
        assert wrong == []
        assert bool((found.state["model"]["weight"] == float(step)).all())
        newest = step


def _copy_until_killed(files, writes):
    """Make a third copy; at the write after so many this process is killed."""
    left, write = iter(range(writes)), os.pwrite

    def write_or_die(*words):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*words)

    os.pwrite = write_or_die
    slots = slots_on(files)
    keep(slots, HostMemory(slots), 3, numbered(3, count=1000))


def test_a_slot_says_nothing_from_the_first_write_to_the_last(files):
    """What it held before is given up first, and what it holds now is said last."""
    context, there, code = multiprocessing.get_context("fork"), [], -signal.SIGKILL
    while code == -signal.SIGKILL:
        slots = slots_on(files)
        slots.clear()
        memory = HostMemory(slots)
        sealed = [keep(slots, memory, step, numbered(step, count=1000)) for step in (1, 2)]
        maker = context.Process(target=_copy_until_killed, args=(files, len(there)))
        maker.start()
        maker.join()
        code = maker.exitcode
        found, wrong = slots.load()
        there.append(([slots.has(one) for one in sealed], found.manifest.step))
        assert wrong == []
    (first, *between, last), nothing_said = there, ([False, True], 2)
    assert (first, last) == (([True, True], 2), ([False, True], 3))
    assert between
    assert between == [nothing_said] * len(between)


@pytest.mark.parametrize("place", ["header", "first byte", "last byte", "what describes it"])
def test_a_copy_with_a_flipped_bit_is_refused(files, place):
    """The one before is taken, which is said, unless the header itself is damaged."""
    slots = slots_on(files)
    memory = HostMemory(slots)
    for step in (1, 2):
        keep(slots, memory, step, numbered(step, count=1000))
    newest = next(one for one in files if b'"step": 2' in os.pread(one, 4096, 0))
    at = {
        "header": 70,
        "first byte": 4096,
        "last byte": 4096 + 3999,
        "what describes it": os.fstat(newest).st_size - 40,
    }[place]
    byte = os.pread(newest, 1, at)
    os.pwrite(newest, bytes([byte[0] ^ 4]), at)
    found, wrong = slots_on(files).load()
    assert (found.manifest.step, found.state["at"]) == (1, 1)
    assert len(wrong) == (place != "header")


def test_the_next_copy_is_made_in_the_place_of_a_damaged_one(files):
    """And not in that of the one that is whole, which is all there is meanwhile."""
    slots = slots_on(files)
    memory = HostMemory(slots)
    for step in (1, 2):
        keep(slots, memory, step, numbered(step))
    newest = next(one for one in files if slots_on([one]).newest_step == 2)
    os.pwrite(newest, b"\1", 5000)
    assert slots_on(files).load()[0].manifest.step == 1
    HostMemory(slots_on(files)).reserve([4 * NUMBERS])
    assert slots_on(files).newest_step == slots_on(files).load()[0].manifest.step == 1


def test_memory_that_is_given_back_is_free(files):
    """Nothing is held any more, and a later copy works again."""
    slots = slots_on(files)
    memory = HostMemory(slots)
    keep(slots, memory, 1, numbered(1))
    slots.release()
    assert (memory.size_bytes, slots.newest_step) == (0, None)
    again = slots_on(files)
    keep(again, HostMemory(again), 2, numbered(2))
    assert slots_on(files).newest_step == 2


def test_memory_that_another_process_has_given_back_is_made_again(files):
    """Who had copied before, and comes to it again, would write behind the end of the file."""
    first, second = slots_on(files), slots_on(files)
    memory = HostMemory(first)
    for step in (1, 2):
        keep(first, memory, step, numbered(step))
    second.release()
    keep(first, memory, 3, numbered(3))
    assert slots_on(files).load()[0].manifest.step == 3


def test_memory_that_is_refused_is_an_error_and_costs_no_whole_copy(files):
    """Who asks may then save without one."""
    slots = slots_on(files)
    memory = HostMemory(slots)
    keep(slots, memory, 1, numbered(1, count=1000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # of a memory file too
    try:
        with pytest.raises(MemoryError):
            memory.snapshot(numbered(2, count=1_000_000), steady=[])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert slots_on(files).load()[0].manifest.step == 1


def test_room_that_is_made_ahead_is_what_copies_are_made_in(files):
    """And no more of it is taken for them; a whole copy is left alone."""
    slots = slots_on(files)
    memory = HostMemory(slots)
    memory.reserve([4 * NUMBERS])
    taken = memory.size_bytes
    assert taken >= 2 * 4 * NUMBERS
    for step in (1, 2, 3):
        keep(slots, memory, step, numbered(step))
    assert taken <= memory.size_bytes <= taken + 2 * 8192, "what describes a copy comes after it"
    other = HostMemory(slots_on(files))
    other.reserve([4 * NUMBERS])
    assert other.size_bytes
    assert slots_on(files).load()[0].manifest.step == 3
