"""What the ranks of a loop of one's own compare when they form, by their numbers in the run."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.own_loop import client
from ddp_runner.training.own_loop.batches import SafeBatches


class Group:
    """A generation in which the others say what a test has them say."""

    rank = 0

    def __init__(self, others, *, generation=1):
        self.membership = SimpleNamespace(generation=generation)
        self._others = others

    def exchange(self, name, value):
        return [value, *(json.dumps([rank, said]) for rank, said in self._others.items())]


@pytest.fixture
def compare(monkeypatch):
    """``compare(own, {rank: digest}, ...)``: why the run is not exact, if rank 0 and others have such data."""

    def compared(own, others, *, before=(), step=0, machines=2, loader=None):
        said = []
        monkeypatch.setattr(client, "report_inexact", lambda _, reason: said.append(reason))
        state = SimpleNamespace(data_of=list(before), committed_step=step)
        info = SimpleNamespace(rank=0, world_size=4, local_world_size=4 // machines)
        one = _client(info, state=state, data_digest=own, loader=loader or SafeBatches(None))
        one._compare_data(Group(others))
        return said, state.data_of

    return compared


def _client(info, **parts):
    made = object.__new__(client.LoopClient)
    slot = SimpleNamespace(stamp=lambda *_: None, set=lambda *_: None)
    made._runtime = SimpleNamespace(rank_info=info, slot=slot)
    made._parts = SimpleNamespace(**parts)
    return made


@pytest.fixture(autouse=True)
def _never_waits(monkeypatch):
    monkeypatch.setattr(client, "waiting_for_peers", lambda _: contextlib.nullcontext())


def test_each_rank_is_held_against_itself_where_others_are_missing(compare):
    """Ranks 1 and 2 are not there: 3 is no 1, and what they had is still known of them."""
    before = ["a", "b", "c", "d"]
    loader = object()  # the loop's own, which may give each rank other data
    assert compare("a", {3: "d"}, before=before, step=5, loader=loader) == ([], before)
    said, now = compare("a", {3: "x"}, before=before, step=5, loader=loader)
    assert said[0].startswith("rank 3 made other data than before: make it behind attach()")
    assert now == ["a", "b", "c", "x"]


def test_who_comes_later_has_made_no_other_data_than_before(compare):
    """A machine that is taken in once the others have trained."""
    everyone = dict.fromkeys((1, 2, 3), "a")
    assert compare("a", {1: "a"}, before=()) == ([], ["a", "a", "", ""])
    assert compare("a", everyone, before=["a", "a", "", ""], step=5) == ([], ["a"] * 4)


def test_one_dataset_that_differs_between_machines_is_inexact(compare):
    """Where run.loader() shares it out; on one machine ranks read the same files."""
    others = {1: "a", 2: "b", 3: "b"}
    said, _ = compare("a", others)
    assert said[0].startswith("ranks 2-3 made other data than rank 0: run.loader() shares one")
    assert compare("a", others, machines=1)[0] == []
    assert compare("a", others, loader=object())[0] == []


@pytest.mark.parametrize(
    ("generation", "line"),
    [
        (1, "layers.py is not the same for ranks 0 and 3: two programs"),
        (2, "layers.py has changed on disk"),
    ],
)
def test_a_module_beside_the_program_must_be_the_same(generation, line):
    """Unless it was said that machines may have different code."""
    run = SimpleNamespace(allow_different_code=False)
    kept = SimpleNamespace(names=lambda: ["model"])
    length = SimpleNamespace(steps_per_epoch=1, total_steps=2)
    one = _client(
        SimpleNamespace(rank=0),
        state=SimpleNamespace(named_parameters=list, committed_step=0, calls=0),
        workload=SimpleNamespace(length=length),
        settings=SimpleNamespace(run=run),
    )
    one._loop = SimpleNamespace(program={"layers.py": "1"}, kept=kept, is_between=False)
    other = {"the file layers.py": "2", "the place in the loop": (0, 0, False)}
    group = Group({3: other}, generation=generation)
    with pytest.raises(BadInputError, match=line):
        one.compare(group)
    run.allow_different_code = True
    one.compare(group)


def _compare_places(own, others, *, uses=True, is_between=False):
    """``own``, and by rank: committed step and calls, and whether it is in a call."""
    step, calls = own
    warned = []
    one = _client(SimpleNamespace(rank=0), state=SimpleNamespace(committed_step=step, calls=calls))
    one._runtime.logger = SimpleNamespace(warning=warned.append)
    one._loop = SimpleNamespace(calls_together=uses, is_between=is_between)
    with contextlib.suppress(SystemExit):
        one._compare_places({0: (*own, is_between), **others})
        return "stays"
    return warned[0]


def test_a_rank_whose_function_was_cut_short_is_replaced_where_others_returned():
    """A rank that is behind, or has no state yet, receives the newest state instead."""
    away = {1: (5, 3, False)}
    assert "interrupted here" in _compare_places(
        (5, 2), {**away, 2: (-1, 0, True)}, is_between=True
    )
    assert _compare_places((5, 3), {1: (5, 2, True)}) == "stays"
    assert _compare_places((5, 2), {1: (5, 2, True)}, is_between=True) == "stays"
    assert _compare_places((4, 2), away) == "stays"
    assert _compare_places((-1, 0), away) == "stays"


def test_a_rank_that_has_not_joined_a_call_is_refused():
    """The others are in it; one that knows of calls is replaced, and joins."""
    others = {1: (5, 2, True), 2: (5, 2, True)}
    assert "that this rank lacks: replacing this rank" in _compare_places((4, 2), others)
    assert _compare_places((-1, 0), others, is_between=True) == "stays"
    with pytest.raises(BadInputError, match=r"calls run.join\(\) before its first batch"):
        _compare_places((-1, 0), others, uses=False)
