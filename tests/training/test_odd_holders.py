"""State where one would not look for it is followed, or named once a step has used it; what does not change is neither."""

from __future__ import annotations

import io
import queue
import time

import pytest
import torch
from torch import nn

from ddp_runner.training.exactness.side_state import SideState
from tests.training.odd_holders import FOLLOWED, NAMED, Node, Rowdy, Task, Wrapped


def _sent(record):
    stream = io.BytesIO()
    torch.save(record, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def _side(task):
    return SideState(nn.Linear(1, 1), task)


@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_step_given_up_is_put_back_whatever_holds_its_state(kind):
    """From the look that has seen it change first."""
    make, step, read = FOLLOWED[kind]
    task = make()
    side = _side(task)
    step(task)
    side.keep(1)
    before = repr(read(task))
    step(task)
    side.drop()
    assert (repr(read(task)), side.take_lost(), side.doubtful) == (before, [], [])


@pytest.mark.parametrize("kind", FOLLOWED)
def test_another_process_has_the_state_whatever_holds_it(kind):
    """By the record that is sent and saved."""
    make, step, read = FOLLOWED[kind]
    task = make()
    side = _side(task)
    for number in range(1, 4):
        step(task)
        side.keep(number)
    record, expected = _sent(side.to_record()), repr(read(task))
    other = make()
    received = _side(other)
    received.restore(record)
    assert (repr(read(other)), received.take_lost(), received.doubtful) == (expected, [], [])


@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_rehearsed_step_leaves_nothing_whatever_holds_its_state(kind):
    """The first step is computed twice, from the same state."""
    make, step, read = FOLLOWED[kind]
    task = make()
    side = _side(task)
    held, before = side.hold(), repr(read(task))
    step(task)
    assert side.follow_changed_since(held)
    assert repr(read(task)) == before


@pytest.mark.parametrize("kind", NAMED)
def test_state_that_is_too_much_or_unreadable_is_named(kind):
    """By whoever takes it over; by the process itself when a step is given up, or it is put back."""
    make, step, read = NAMED[kind]
    task = make()
    side = _side(task)
    held = side.hold()
    step(task)
    side.follow_changed_since(held)
    side.keep(1)
    received = _side(make())
    received.restore(_sent(side.to_record()))
    assert "task.held" in " ".join((*received.take_lost(), *received.doubtful))
    before = read(task)
    step(task)
    side.drop()
    is_named = "task.held" in " ".join((*side.take_lost(), *side.doubtful))
    assert is_named or repr(read(task)) == repr(before)


@pytest.mark.parametrize("kind", [*FOLLOWED, *(one for one in NAMED if one != "SimpleQueue")])
def test_state_that_no_step_changes_is_not_named(kind):
    """Control: many looks, a step that is given up, and another process."""
    make, _, _ = (FOLLOWED | NAMED)[kind]
    side = _side(make())
    assert side.follow_changed_since(side.hold()) == []
    for number in range(1, 30):
        side.look()
        side.keep(number)
    side.drop()
    assert (side.take_lost(), side.doubtful, side.followed_names()) == ([], [], [])
    received = _side(make())
    received.restore(_sent(side.to_record()))
    assert (received.take_lost(), received.doubtful) == ([], [])


def test_an_object_that_refuses_every_question_ends_nothing():
    """It is looked at, kept, dropped and restored around."""
    task = Task()
    task.held, task.n = [Rowdy()], 0
    side = _side(task)
    task.n += 1
    side.keep(1)
    side.drop()
    side.restore(_sent(side.to_record()))
    assert (task.n, side.take_lost()) == (1, [])


class Closing:
    """Gives its state until somebody ends it."""

    def __init__(self):
        self.is_open = True

    def state_dict(self):
        if not self.is_open:
            raise RuntimeError("closed")
        return {"n": 1}

    def load_state_dict(self, state):
        self.state_dict()


def test_a_state_that_can_no_longer_be_read_is_named():
    """By the step that is given up, and by whoever takes it over."""
    task = Task()
    task.held = Closing()
    side = _side(task)
    side.keep(1)
    task.held.is_open = False
    side.keep(2)
    record = _sent(side.to_record())
    side.drop()
    other = Task()
    other.held = Closing()
    received = _side(other)
    received.restore(record)
    assert side.take_lost() == received.take_lost() == ["task.held"]


def test_wrappers_of_libraries_are_no_state():
    """Control: what singledispatch, contextmanager, no_grad and lru_cache keep for themselves."""
    task = Wrapped()
    side = _side(task)
    for number in range(1, 5):
        task.loss()
        side.keep(number)
    side.drop()
    assert (side.followed_names(), side.take_lost(), side.doubtful) == (["task.later"], [], [])


def test_an_empty_simple_queue_has_nothing_to_lose():
    """Control: used within a step, and empty after it."""
    task = Task()
    task.held = queue.SimpleQueue()
    side = _side(task)
    task.held.put(1), task.held.get()
    side.keep(1)
    side.drop()
    assert side.doubtful == []


CONTENTS = {
    "lists": (list, lambda one: one.append(1), list),
    "tensors": (lambda: torch.zeros(2), lambda one: one.add_(1), torch.Tensor.tolist),
    "dicts": (dict, lambda one: one.update(n=len(one)), dict),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_two_names_that_a_step_gave_one_object_stay_one(kind):
    """In another process, and inside of a list too."""
    make, change, read = CONTENTS[kind]

    def made():
        task = Task()
        task.best, task.now, task.all = make(), make(), []
        return task

    task = made()
    side = _side(task)
    task.best = task.now
    task.all.append(task.now)
    change(task.now)
    side.keep(1)
    other = made()
    received = _side(other)
    received.restore(_sent(side.to_record()))
    change(other.now)
    assert other.best is other.now is other.all[0]
    change(task.now)
    assert read(other.best) == read(task.best)


@pytest.mark.parametrize("kind", CONTENTS)
def test_two_objects_that_a_dropped_step_made_one_are_two_again(kind):
    """Each with what it held."""
    make, change, read = CONTENTS[kind]
    task = Task()
    task.best, task.now = make(), make()
    side = _side(task)
    change(task.now), change(task.best), change(task.now)
    side.keep(1)
    before = read(task.best), read(task.now)
    change(task.now)
    task.best = task.now
    side.drop()
    assert (read(task.best), read(task.now)) == before
    assert task.best is not task.now


@pytest.mark.parametrize("make", [
    lambda: [Node(n) for n in range(100_000)],
    lambda: [{"a": n, "b": str(n)} for n in range(100_000)],
    lambda: [*range(1_000_000)],
    lambda: {n: [Node(n)] for n in range(100_000)},
], ids=["objects", "dicts", "numbers", "dict of lists"])  # fmt: skip
def test_a_look_at_very_much_takes_no_longer_than_a_bound(make):
    """By the processor's time; the fastest of some, with other work beside."""
    task = Task()
    task.held = make()
    side = _side(task)
    spent = []
    for _ in range(5):
        began = time.process_time()
        side.look()
        spent.append(time.process_time() - began)
    assert min(spent) < 0.05, spent


def _long_after_its_begin(task):
    """Its looks are rare by now."""
    side = _side(task)
    for number in range(1, 6):
        side.keep(number)
    side._credit_s = -1e9
    return side


def test_a_record_has_what_changed_since_the_last_look():
    """As a stop saves it, whose resume has nothing else."""
    task = Task()
    task.n = 0
    side = _long_after_its_begin(task)
    task.n = 7
    side.keep(6)
    assert side.followed_names() == []
    other = Task()
    other.n = 0
    _side(other).restore(_sent(side.to_record()))
    assert other.n == 7


def test_a_comparison_before_a_save_sees_all_of_very_much():
    """Of which a look sees a part only: a table that a step changes in one place."""
    task = Task()
    task.table = [[n] for n in range(110_000)]
    side = _long_after_its_begin(task)
    task.table[105_000][0] = 7
    side.keep(6)
    assert side.followed_names() == []
    side.look_again(whole=True)
    assert side.followed_names() == ["task.table"]


def test_a_step_given_up_right_after_a_look_leaves_the_value():
    """A look between two steps has seen it change, as before an evaluation."""
    task = Task()
    task.n = 0
    side = _long_after_its_begin(task)
    task.n = 7
    side.keep(6)
    side.look()
    task.n = 8
    side.drop()
    assert (task.n, side.take_lost()) == (7, [])
