"""What each rank has of its own, without processes: kept, put back, given to a replacement, saved by rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import random
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.system.local_places import STEPS
from ddp_runner.training.local_state import by_value, gathering, rank_memory
from ddp_runner.training.local_state.by_value import KeptLocally
from ddp_runner.training.local_state.local_state import LOCAL, LocalState, packed, unpacked


class Env:
    """An environment as people write one: plain attributes, a generator, an array, objects in it."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.at = np.zeros(3)
        self.inner = SimpleNamespace(level=0, seen=[])
        self.games = 0

    def play(self):
        self.at += self.rng.standard_normal(3)
        self.games += 1
        self.inner.level += 1
        self.inner.seen.append(float(self.at[0]))


@dataclasses.dataclass(frozen=True)
class Settled:
    """A dataclass that does not let itself be written."""

    numbers: list


class Slotted:
    """An object without a dict."""

    __slots__ = ("count",)

    def __init__(self, count):
        self.count = count


class Stateful:
    """An object with a state of its own, and something that no pickle takes."""

    def __init__(self):
        self.count, self.stream = 0, (one for one in ())

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.fixture
def shared():
    """The path of a machine's file, as a supervisor hands it out."""
    descriptor = os.memfd_create("local_state")
    yield f"/proc/self/fd/{descriptor}"
    os.close(descriptor)


def local_of(objects, path, *, rank=0, ranks=2, here=None, **how):
    made = LocalState(objects, option="keep_local", **how)
    here = ranks if here is None else here
    paths = () if path is None else (path,)
    made.belongs_to(
        SimpleNamespace(
            rank=rank,
            local_rank=rank % here,
            world_size=ranks,
            local_world_size=here,
            local_slots=paths,
        )
    )
    return made


def step(local, number, change, late=None):
    """One step that nothing happens to, from ``number - 1``."""
    change()
    local.seal(number)
    local.committed(number)
    if late is not None:
        late()
    local.settle()


KINDS = {
    "object": (Env, Env.play, lambda env: (env.at.tolist(), env.games, vars(env.inner).copy())),
    "dict": (lambda: {"n": [1, {2: 3}]}, lambda d: d["n"][1].update({2: 9, 4: 5}), repr),
    "ordered": (lambda: OrderedDict(a=1), lambda d: d.update(b=2), repr),
    "list": (lambda: [np.zeros(2)], lambda l: (l.append(1), l[0].fill(7)), repr),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda d: d.append(np.float32(3)), repr),
    "set": (lambda: {1}, lambda s: s.add(2), repr),
    "bytes": (lambda: bytearray(b"ab"), lambda b: b.extend(b"c"), repr),
    "array": (lambda: np.arange(40_000.0), lambda a: np.add(a, 1, out=a), lambda a: a.tobytes()),
    "tensor": (lambda: torch.zeros(3), lambda t: t.add_(1), repr),
    "half": (lambda: {"t": torch.zeros(3, dtype=torch.bfloat16)}, lambda d: d["t"].add_(1), repr),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.random(), lambda g: g.random()),
    "torch": (torch.Generator, lambda g: torch.rand(1, generator=g), lambda g: g.get_state().sum()),
    "python": (lambda: random.Random(5), lambda r: r.random(), lambda r: r.random()),
    "frozen": (lambda: Settled([1]), lambda s: s.numbers.append(2), repr),
    "slots": (lambda: Slotted(1), lambda s: setattr(s, "count", 2), lambda s: s.count),
    "state_dict": (Stateful, lambda s: setattr(s, "count", 4), lambda s: s.count),
    "module": (lambda: nn.LayerNorm(2), lambda m: m.weight.data.add_(1), lambda m: repr(m.weight)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_object_is_put_back_in_place(kind, shared):
    """It stays the object that the program holds, in this process and where another one takes over."""
    make, change, look = KINDS[kind]
    one = make()
    local = local_of({"one": one}, shared)
    local.begin(0)
    step(local, 1, lambda: change(one))
    change(one)
    local.put_back()
    other = make()
    taken = local_of({"one": other}, shared)
    taken.go_to(1, None, is_begin=False)
    assert repr(look(other)) == repr(look(one))
    assert [*local.take_lost(), *taken.take_lost()] == []
    fresh = make()
    change(fresh)
    if kind not in ("numpy", "python"):  # what looks at those changes them
        assert repr(look(fresh)) == repr(look(one))


def test_a_late_change_on_the_drilled_rank_is_in_its_drill(shared):
    """Rank 0 writes the state of the step while rank 1 is between its update and the next step."""
    env, drilled = Env(1), Env(1)
    saves, lags = local_of({"env": Env()}, shared), local_of({"env": env}, shared, rank=1)
    for one in (saves, lags):
        one.begin(0)
        one.seal(1)
        one.committed(1)
    saves.settle()
    written = saves.of_ranks(1)[LOCAL]
    env.play()
    lags.settle()
    handed = lags.to_hand_over(1)
    assert saves.to_hand_over(1) is None
    replacement = local_of({"env": drilled}, None, rank=1)
    replacement.begin_with(handed)
    replacement.go_to(1, written, is_begin=False)
    assert replacement.take_lost() == []
    assert KINDS["object"][2](drilled) == KINDS["object"][2](env)
    assert drilled.games == 1


def test_what_functions_between_steps_change_is_handed_over_too(shared):
    """Rank 0 may be past its own, and rank 1 inside one."""
    env = Env()
    local = local_of({"env": env}, shared, rank=1)
    local.begin(0)
    step(local, 1, env.play)
    assert local.to_hand_over(1) is None
    env.play()
    local.changed_between()
    other = Env()
    taken = local_of({"env": other}, None, rank=1)
    taken.begin_with(local.to_hand_over(1))
    taken.go_to(1, None, is_begin=False)
    assert other.games == 2


@dataclasses.dataclass
class Sample:
    """A batch as tasks make them."""

    inputs: torch.Tensor
    labels: np.ndarray
    rest: dict


def test_a_batch_of_own_types_is_handed_over_as_it_lies():
    """Tensors keep their strides and where they begin; what is there twice is one again."""
    base = torch.arange(4096.0).reshape(64, 64)
    rows = {
        "slice": base[1:, 1:7],
        "expanded": torch.ones(3, 1).expand(3, 5),
        "channels": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "number": torch.tensor(2),
    }
    batch = [Sample(base, np.arange(40_000), {**rows, "again": base})]
    found = by_value.taken_over(unpacked(packed(by_value.handed_over(batch))), like=[])
    assert torch.equal(found[0].inputs, base)
    assert found[0].rest["again"] is found[0].inputs
    assert np.array_equal(found[0].labels, batch[0].labels)
    for name, row in rows.items():
        other = found[0].rest[name]
        assert torch.equal(other, row), name
        assert (other.dtype, other.stride()) == (row.dtype, row.stride()), name
        assert (other.data_ptr() - row.data_ptr()) % 64 == 0 or not row.numel(), name


def test_a_batch_has_nothing_built_but_known_types():
    """Plain values, classes of the program, and what the process's own batch consists of."""
    handed = by_value.handed_over([nn.Parameter(torch.ones(1))])
    with pytest.raises(pickle.UnpicklingError, match="may not build"):
        by_value.taken_over(handed, like=[torch.ones(1)])
    [one] = by_value.taken_over(handed, like=[nn.Parameter(torch.zeros(1))])
    assert one.item() == 1.0
    with pytest.raises(pickle.UnpicklingError, match="system"):
        by_value.taken_over(by_value.handed_over(os.system), like=[])


def test_after_a_roll_back_the_older_step_is_what_is_put_back(shared):
    """Nothing of the course that was left is there any more, for this process or the next one."""
    env = Env()
    local = local_of({"env": env}, shared, ranks=1)
    local.begin(0)
    step(local, 1, env.play)
    record = local.of_ranks(1)[LOCAL]
    for number in (2, 3):
        step(local, number, env.play)
    local.go_to(1, record, is_begin=False)
    env.play()
    local.put_back()
    assert env.games == 1
    step(local, 2, env.play)
    taken = local_of({"env": Env()}, shared, ranks=1)
    taken.go_to(3, None, is_begin=False)
    assert "nothing was kept for rank 0 at step 3" in taken.take_lost()[0]


def test_what_objects_share_stays_shared(shared):
    """A generator that the environment has too, and an environment that knows its own buffer."""
    env, replay = Env(), []
    env.replay, env.itself, at = replay, env, env.at
    local = local_of({"env": env, "replay": replay, "rng": env.rng}, shared)
    local.begin(0)
    env.play()
    replay.append((env.at.copy(), env))
    local.put_back()
    assert env.replay is replay
    assert replay == []
    assert env.itself is env
    assert env.at is at
    assert env.rng.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.5, "is of type float, which cannot be changed in place: put it into a dict"),
        ("text", "is of type str, which cannot be changed in place"),
        (iter([1]), "cannot be given back in place"),
        ({"log": open}, ""),
        (
            {"inner": [1, (one for one in ())]},
            r"cannot be kept: one\['inner'\]\[1\] is of type gen",
        ),
        (SimpleNamespace(f=lambda: 0), r"cannot be kept: one\.f is of type function"),
    ],
    ids=["float", "text", "iterator", "builtin", "generator", "lambda"],
)
def test_an_object_that_cannot_be_kept_is_named(value, words):
    """With the place in it, in one line."""
    if not words:
        KeptLocally({"one": value}, option="keep_local")
        return
    with pytest.raises(BadInputError, match=words) as refused:
        KeptLocally({"one": value}, option="keep_local")
    assert "keep_local(one=...)" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_survivor_has_what_the_committed_step_has_left(shared):
    """Once for each step, however often the step after it breaks, and wherever in it."""
    env = Env()
    local = local_of({"env": env}, shared)
    local.begin(0)
    for number in (1, 2, 3):
        for breaks in (lambda: None, lambda number=number: local.seal(number)):
            env.play()
            breaks()
            local.put_back()
            assert env.games == number - 1
        step(local, number, env.play)
    local.put_back()
    assert env.games == 3


@pytest.mark.parametrize("is_tasks", [False, True])
def test_a_rank_that_dies_behind_the_sum_gets_that_step(shared, is_tasks):
    """It has not committed the step, others have."""
    env = Env()
    local = local_of({"env": env}, shared, is_tasks=is_tasks)
    local.begin(0)
    step(local, 1, env.play)
    env.play()
    local.seal(2)
    other = Env()
    taken = local_of({"env": other}, shared, is_tasks=is_tasks)
    taken.go_to(2, None, is_begin=False)
    assert other.games == 2
    assert taken.take_lost() == []


def test_a_rank_that_dies_before_anybody_has_committed_gets_the_step_before(shared):
    """What it has sealed of the step that broke counts for nothing, and is written over."""
    env = Env()
    local = local_of({"env": env}, shared)
    local.begin(0)
    step(local, 1, env.play)
    env.play()
    local.seal(2)
    other = Env()
    taken = local_of({"env": other}, shared)
    taken.go_to(1, None, is_begin=False)
    taken.begin(1)
    assert other.games == 1
    step(taken, 2, other.play)
    taken.put_back()
    assert other.games == 2


def test_changes_behind_the_update_are_kept_or_named(shared):
    """A rank that is lost behind its update has not made them; any other has them."""
    env = Env()
    local = local_of({"env": env}, shared)
    local.begin(0)
    step(local, 1, env.play, late=env.play)
    taken = local_of({"env": Env()}, shared)
    taken.go_to(1, None, is_begin=False)
    assert (taken.inner()[0].games, taken.take_lost()) == (2, [])
    env.play()
    local.seal(2)
    cut = local_of({"env": Env()}, shared)
    cut.go_to(2, None, is_begin=False)
    (line,) = cut.take_lost()
    assert line.startswith("env of rank 0: the process was lost, or its step cut short, after")
    assert "step 2, where the loop may change kept objects: change them before that" in line


class CutShort:
    """Writes as a process does that is killed within its write number ``last``: half of that is there."""

    def __init__(self, last):
        self._last = last
        self._write = os.pwrite

    def __call__(self, descriptor, data, at):
        self._last -= 1
        if self._last >= 0:
            return self._write(descriptor, data, at)
        view = memoryview(data)
        self._write(descriptor, view[: len(view) // 2], at)
        raise KeyboardInterrupt


@pytest.mark.parametrize("last", range(5))
def test_what_is_cut_short_leaves_the_step_before(shared, monkeypatch, last):
    """Killed at each write of a step's bytes: the step before is whole, and this one is not there."""
    held = {"big": np.zeros(1 << 15), "small": [0]}

    def change():
        held["big"] += 1
        held["small"][0] += 1

    local = local_of({"held": held}, shared)
    local.begin(0)
    for number in range(1, 1 + STEPS):  # every place has held something
        step(local, number, change)
    change()
    is_whole = last == 4
    with monkeypatch.context() as cut:
        cut.setattr(rank_memory.os, "pwrite", CutShort(last))
        with contextlib.nullcontext() if is_whole else pytest.raises(KeyboardInterrupt):
            local.seal(STEPS + 1)
    other = {"big": np.zeros(1 << 15), "small": [0]}
    taken = local_of({"held": other}, shared)
    places = [(place, place.header()) for place in taken._memory.own[:STEPS]]
    for place, header in places:  # each holds what it says, or nothing
        if header is not None:
            taken._kept.put_back(place.read(header))
            assert other["small"][0] == header.step == other["big"][-1]
    assert (STEPS + 1 in [one.step for _, one in places if one is not None]) == is_whole
    taken.go_to(STEPS, None, is_begin=False)
    assert taken.take_lost() == []
    assert other["small"][0] == STEPS == other["big"][-1]


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_hundreds_of_schedules_of_two_ranks(late):
    """Killed or interrupted anywhere: each rank has what its undisturbed run has, or a line names it."""
    drawn = random.Random(7)
    lines = []
    for _ in range(100):
        descriptor = os.memfd_create("local_state")
        pair = Pair(drawn, f"/proc/self/fd/{descriptor}", late=late)
        while min(pair.steps) < 6:
            pair.make_step()
        lines += pair.lines
        os.close(descriptor)
    assert bool(lines) == late


BODY, SEALED, COMMITTED, LATE, SETTLED = range(5)


class Pair:
    """Two ranks that make steps; what breaks a step kills one of them, or neither."""

    def __init__(self, drawn, path, *, late):
        self._drawn, self._path, self._late = drawn, path, late
        self.logs = [[], []]
        self._ranks = [self._made(rank) for rank in (0, 1)]
        self.steps, self.lines = [0, 0], []
        for one in self._ranks:
            one.begin(0)

    def _made(self, rank):
        return local_of({"log": self.logs[rank]}, self._path, rank=rank)

    def _expected(self, rank, number):
        parts = ("body", "late") if self._late else ("body",)
        return [(rank, n, part) for n in range(1, number + 1) for part in parts]

    def make_step(self):
        number, reached = self.steps[0] + 1, [SETTLED, SETTLED]
        # What follows an update is known once a step was made.
        if number > 1 and self._drawn.random() < 0.4:
            reached = [self._drawn.randrange(5), self._drawn.randrange(5)]
            if min(reached) < SEALED:  # nobody commits before both have sealed
                reached = [min(one, SEALED) for one in reached]
        for rank in (0, 1):
            self._go(rank, number, reached[rank])
        if reached != [SETTLED, SETTLED]:
            self._repair(number, reached)

    def _go(self, rank, number, reached, begun=-1):
        one, log = self._ranks[rank], self.logs[rank]
        for where in range(begun + 1, reached + 1):
            if where == BODY:
                log.append((rank, number, "body"))
            elif where == SEALED:
                one.seal(number)
            elif where == COMMITTED:
                one.committed(number)
                self.steps[rank] = number
            elif where == LATE and self._late:
                log.append((rank, number, "late"))
            elif where == SETTLED:
                one.settle()

    def _repair(self, number, reached):
        killed = self._drawn.choice([None, 0, 1])
        for rank in (0, 1):
            if rank == killed:
                self.logs[rank] = []
                self._ranks[rank] = self._made(rank)
                self.steps[rank] = -1
            elif self.steps[rank] == number:  # it ends the step that it has committed
                self._go(rank, number, SETTLED, begun=reached[rank])
            else:
                self._ranks[rank].put_back()
        newest = max(self.steps)
        for rank, one in enumerate(self._ranks):
            if self.steps[rank] != newest:
                one.go_to(newest, None, is_begin=newest == 0)
                self.steps[rank] = newest
            one.begin(newest)
            if lost := one.take_lost():
                self.lines += lost
                self.logs[rank][:] = self._expected(rank, newest)  # the schedule goes on
                for place in one._memory.own:
                    place.clear()
                one.begin(newest)
            assert self.logs[rank] == self._expected(rank, newest), (reached, killed)


def test_functions_between_steps_are_in_a_file_and_not_in_a_repair(shared):
    """They are called again after a repair, and not at a resume."""
    env = Env()
    local = local_of({"env": env}, shared, ranks=1)
    local.begin(0)
    step(local, 1, env.play)
    env.play()  # a function between steps
    local.changed_between()
    local.put_back()  # a body for nothing was made behind it
    assert env.games == 2
    taken = local_of({"env": Env()}, None, ranks=1)
    taken.go_to(1, local.of_ranks(1)[LOCAL], is_begin=False)
    assert taken.inner()[0].games == 2
    local.forget_between()
    local.put_back()
    assert env.games == 1


def test_a_file_has_what_each_rank_has(shared):
    """The rank that saves reads that of all ranks of its machine; each one takes its own back."""
    envs = [Env(seed) for seed in range(3)]
    ranks = [local_of({"env": env}, shared, rank=r, ranks=3) for r, env in enumerate(envs)]
    for one, env in zip(ranks, envs, strict=True):
        one.begin(0)
        step(one, 1, env.play)
    envs[2].play()
    ranks[2].seal(2)  # a rank that is ahead
    record = ranks[0].of_ranks(1)[LOCAL]
    assert sorted(record) == ["0", "1", "2"]
    for rank, ranks_now in ((1, 3), (1, 2), (3, 4)):
        taken = local_of({"env": Env()}, None, rank=rank, ranks=ranks_now)
        taken.go_to(1, record, is_begin=False)
        env, lost = taken.inner()[0], taken.take_lost()
        assert env.games == (1 if rank < 3 else 0)
        if rank < 3:
            assert env.at.tolist() == envs[rank].at.tolist()
        assert bool(lost) == (rank == 3)
    first = local_of({"env": Env()}, None, rank=0, ranks=2)
    first.go_to(1, record, is_begin=False)
    assert first.take_lost() == [
        "the per-rank state of rank 2 (env) is left out: this run has 2 ranks"
    ]
    assert first.to_hand_on(1)[LOCAL] == record
    first.committed(2)
    assert first.to_hand_on(2) == first.to_hand_on(1) == {}


def test_without_a_record_it_goes_on_as_built_and_says_so():
    """A checkpoint of before; at the run's first step there is nothing to lose."""
    fresh = local_of({"env": Env()}, None)
    fresh.go_to(0, None, is_begin=True)
    assert fresh.take_lost() == []
    older = local_of({"env": Env(), "n": [1]}, None, rank=1)
    older.go_to(7, None, is_begin=False)
    assert older.take_lost() == [
        "env, n of rank 1 keep the content of this process: nothing was kept for rank 1 at step 7"
    ]


def test_a_file_of_other_objects_is_not_put_back():
    """It is named, and nothing is changed."""
    local = local_of({"env": Env()}, None, ranks=1)
    local.begin(3)
    record = local.of_ranks(3)[LOCAL]
    taken = local_of({"other": [1]}, None, ranks=1)
    taken.go_to(3, record, is_begin=False)
    (line,) = taken.take_lost()
    assert "it could not be put back (UnpicklingError: it is of env)" in line
    with pytest.raises(ValueError, match="has another form"):
        taken.go_to(3, {"x": 1}, is_begin=False)


class _Bad:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_file_cannot_have_other_functions_called(monkeypatch):
    """Only plain values and the program's own classes; a repair on this machine knows who wrote."""
    kept = KeptLocally({"one": [1]}, option="x")
    bad = by_value.Pickled(pickle.dumps({"one": ("plain", [_Bad()])}, protocol=5), [])
    monkeypatch.setattr(os, "system", lambda _: pytest.fail("it was called"))
    with pytest.raises(pickle.UnpicklingError, match=r"may not build posix\.system"):
        kept.put_back(bad, is_foreign=True)
    assert kept.objects["one"] == [1]
    own = KeptLocally({"one": [Env(), np.float32(2), np.random.default_rng(1)]}, option="x")
    kept.put_back(own.pickled(), is_foreign=True)
    assert kept.objects["one"][1] == 2


def test_who_keeps_nothing_does_nothing():
    """No memory is opened, no rank is asked, and no state has more than before."""
    local = local_of({}, "/nowhere")
    local.seal(1)
    local.settle()
    local.put_back()
    assert local.agree(None, None, places=(0, 1), step=0) == ""
    local.await_all(None, None, 1)
    assert local.of_ranks(1) == {}
    assert local.take_lost() == []


def test_a_state_without_objects_hands_on_what_a_file_has():
    """The rank that loads, of a program that keeps nothing by now."""
    local = local_of({}, None)
    record = {"0": torch.zeros(8, dtype=torch.uint8)}
    local.go_to(4, record, is_begin=False)
    assert local.to_hand_on(4) == {LOCAL: record}


def test_much_has_its_cost_said_once(monkeypatch):
    """In one line, from the steps that were made."""
    monkeypatch.setattr("ddp_runner.training.local_state.local_state.LARGE_BYTES", 1_000)
    big = np.zeros(1_000_000)
    local = local_of({"big": big}, None, ranks=1)
    local.begin(0)
    said = []
    for number in range(1, 12):
        step(local, number, lambda: big.__iadd__(1))
        said.append(local.cost_line())
    (line,) = filter(None, said)
    assert line.startswith("big: 8 MB are copied for this rank at each step, which takes ")


class Wire:
    """A group whose ranks are all in this process: they are asked one after the other, rank 0 last."""

    def __init__(self, locals_):
        self.said = [f"[{one.rank}, {one.machine}, [false, []]]" for one in locals_]
        self.sent, self.world_size, self.rank = {}, len(locals_), 0

    def exchange(self, _, value):
        assert value == self.said[self.rank]
        return self.said


def test_a_file_has_ranks_that_the_saving_one_cannot_read(monkeypatch):
    """Of all where no supervisor hands out memory."""
    envs = [Env(seed) for seed in range(4)]
    ranks = [local_of({"env": env}, None, rank=r, ranks=4) for r, env in enumerate(envs)]
    for one, env in zip(ranks, envs, strict=True):
        one.begin(0)
        step(one, 1, env.play)
    wire = Wire(ranks)
    monkeypatch.setattr(gathering, "send_state", lambda g, s, to: g.sent.update({g.rank: s}))
    monkeypatch.setattr(gathering, "receive_state", lambda g, source: g.sent[source])
    for wire.rank in (1, 2, 3, 0):
        gathering.gather_local(ranks[wire.rank], wire, step=1)
    assert len(wire.sent) == 3
    record = ranks[0].of_ranks(1)[LOCAL]
    assert sorted(record) == ["0", "1", "2", "3"]
    for rank in range(4):
        taken = local_of({"env": Env()}, None, rank=rank, ranks=4)
        taken.go_to(1, record, is_begin=False)
        assert taken.inner()[0].at.tolist() == envs[rank].at.tolist()


def test_ranks_that_keep_other_things_are_refused():
    """With both lists."""
    local = local_of({"env": Env()}, None)
    slot = SimpleNamespace(get=lambda _: 0, stamp=lambda *_: None)

    def exchange(_, value):
        return [value, json.dumps({**json.loads(value), "rank": 1, "names": "replay"})]

    group = SimpleNamespace(exchange=exchange, rank=0)
    assert local.agree(group, slot, places=(0, 1), step=0) == "ranks 0 and 1 keep env and replay"


class Ranks:
    """A generation of two ranks on one machine; ``is_aborted`` once somebody is lost."""

    rank, world_size = 0, 2
    ends_in_silence = False

    def __init__(self):
        self.membership = SimpleNamespace(generation=3, world_size=2, local_world_size=2)
        self.looks = 0
        self.on_look = lambda: None

    def exchange(self, _, value):
        return [value, value]

    def refuse_aborted(self):
        self.looks += 1
        self.on_look()


def test_no_rank_goes_on_before_the_other_has_sealed_its_step(shared):
    """Neither a seal of an earlier step counts, nor one of an earlier generation; an abort ends the wait."""
    slot = SimpleNamespace(get=lambda _: 0, stamp=lambda *_: None)
    ranks, groups = [], [Ranks(), Ranks()]
    for rank, group in enumerate(groups):
        ranks.append(local_of({"log": [rank]}, shared, rank=rank))
        ranks[rank].agree(group, slot, places=(0, 1), step=4)
    first, second = ranks
    groups[0].on_look = lambda: second.await_all(groups[1], slot, 5)  # rank 1 comes while 0 waits
    first.await_all(groups[0], slot, 5)
    assert groups[0].looks == 1

    def lost():
        raise ConnectionError("the generation was aborted")

    groups[0].on_look = lost
    with pytest.raises(ConnectionError):  # rank 1 has only sealed 5
        first.await_all(groups[0], slot, 6)
    for group in groups:
        group.membership.generation = 4
    with pytest.raises(ConnectionError):  # nor is that of this generation
        first.await_all(groups[0], slot, 5)
