"""The share of a loop's step: which gradients count, where a drill ends, and what a first step that differs means."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddp_runner.features.proof.loop_comparison import changed_file
from ddp_runner.features.proof.rules import drilled_rank_of_loop
from ddp_runner.training.exactness.first_step import NOT_DONE, not_repeated
from ddp_runner.training.exactness.own_update import Sums, first_unlike, hashes_after
from ddp_runner.training.own_loop import repeat_check
from ddp_runner.training.own_loop.drilled_run import LoneBody, ShareWanted
from ddp_runner.training.own_loop.net import AttachedModule
from ddp_runner.training.own_loop.repeat_check import RepeatCheck
from ddp_runner.training.own_loop.watched_step import LoopNotes, WatchedStep

from .building import build_state, make_slot


def small_state():
    """As much of a state as shares are noted by."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    return SimpleNamespace(
        model=model,
        named_parameters=model.named_parameters,
        committed_step=0,
        carried=[],
        tuning=SimpleNamespace(find_unused_parameters=False),
        buffers=SimpleNamespace(live=lambda: [*model.buffers()]),
    )


class EndedError(BaseException):
    """In the place of the end of a process: nothing of a loop catches it."""


class Body:
    """A drilled body of a small net, whose end is written down."""

    def __init__(self, sums=None):
        self.state = small_state()
        self.state.is_rehearsed = False
        self.net = AttachedModule(self.state.model)
        self.found = []
        wanted = ShareWanted(
            rank=1,
            world_size=2,
            sums=sums,
            begins=lambda *_: None,
            checks=self._checks,
            ends=self._ends,
            updated=self._updated,
            fails=self._fails,
        )
        self.lone = LoneBody(self.net, SimpleNamespace(state=self.state), wanted)
        self.lone.begin()
        self.rows = torch.arange(12.0).reshape(3, 4) / 12

    def _checks(self, parts, share):
        self.found.append(share.gradients)

    def _updated(self, parts):
        self.found.append("updated")
        raise EndedError

    def _ends(self, parts):
        raise EndedError

    def _fails(self, problem):
        self.found.append(problem)
        raise EndedError

    def loss(self, rows):
        return self.net(rows).square().mean()

    def gradients_of(self, loss):
        """The hashes of what a plain backward gives, and no gradient behind."""
        notes = LoopNotes.of(self.state)
        gradients = torch.autograd.grad(loss, list(self.state.model.parameters()))
        for parameter, gradient in zip(self.state.model.parameters(), gradients, strict=True):
            notes.gradient(parameter, gradient)
        return notes.share().gradients


def test_a_drill_ends_with_the_first_backward_that_is_summed():
    """Micro-batches before it, whose sums are put off, are in it; nothing behind it is reached."""
    body = Body()
    module = body.state.model
    both = module(body.rows[:1]).square().mean() + module(body.rows[1:]).square().mean()
    expected = body.gradients_of(both)
    with body.net.no_sync():
        body.loss(body.rows[:1]).backward()
    assert body.found == []
    loss = body.loss(body.rows[1:])
    with pytest.raises(EndedError):
        loss.backward()
    assert body.found == [expected]


def test_gradients_before_the_net_is_called_are_no_sum():
    """As under DDP: a penalty on the weights alone is added, and waits for the backward of the net."""
    body = Body()
    sum(one.square().sum() for one in body.state.model.parameters()).backward()
    assert body.found == []
    loss = body.loss(body.rows)
    with pytest.raises(EndedError):
        loss.backward()
    assert len(body.found[0]) == len(list(body.state.model.parameters()))


def test_what_is_asked_of_other_ranks_ends_a_drill():
    """Before the first backward nothing is known; behind it, where a parameter was left out, its share is."""
    early, late = Body(), Body()
    with pytest.raises(EndedError):
        early.lone.asked("allreduce")
    assert early.found == ["the loop asks the other ranks for something (allreduce)"]
    unused = nn.Parameter(torch.ones(1))
    late.state.model.register_parameter("unused", unused)
    late.loss(late.rows).backward()
    assert late.found == []
    with pytest.raises(EndedError):
        late.lone.asked("allreduce")
    assert "unused" not in late.found[0]
    assert len(late.found[0]) == len(list(late.state.model.parameters())) - 1


def sums_of(body, value):
    """Sums over ranks that are all ``value``."""
    gradients = {
        name: torch.full_like(one, value) for name, one in body.state.model.named_parameters()
    }
    return Sums(gradients=gradients, buffers=[])


def test_where_sums_are_handed_over_a_body_goes_on_to_its_update():
    """With them in the gradients, once the whole backward is over; the share was compared before."""
    body = Body()
    body = Body(sums=sums_of(body, 0.5))
    loss = body.loss(body.rows)
    expected = body.gradients_of(body.loss(body.rows))
    loss.backward()
    assert body.found == [expected]
    assert all((one.grad == 0.5).all() for one in body.state.model.parameters())
    body.lone.update_begins()
    with pytest.raises(EndedError):
        body.lone.end()
    assert body.found == [expected, "updated"]


@pytest.mark.parametrize("by", ["asked", "end"])
def test_without_an_update_a_body_ends_with_its_share(by):
    """Where other ranks are asked behind the backward, or no optimizer steps."""
    body = Body()
    body = Body(sums=sums_of(body, 0.5))
    body.loss(body.rows).backward()
    with pytest.raises(EndedError):
        body.lone.asked("allreduce") if by == "asked" else body.lone.end()
    assert len(body.found) == 1


def noted_sums(*backwards, relaid=0.0, wants=True):
    """The sums that are noted of a step with these backwards, each a list of gradients."""
    state = small_state()
    notes = LoopNotes.of(state)
    notes.wants_sums = wants
    parameter = next(state.model.parameters())

    def take(gradient):
        notes.gradient(parameter, gradient)

    parameter.register_hook(take)
    for factor in backwards:
        (factor * parameter.sum()).backward()
    notes.update_begins(is_relaid=relaid > 0)
    return notes.sums


def test_the_sums_of_a_step_are_copied_as_its_backward_leaves_them():
    """Of one backward; what follows from a sum before it, and buffers of another shape, are not handed over."""
    found = noted_sums(3.0)
    assert [*found.gradients] == ["0.weight"]
    assert (found.gradients["0.weight"] == 3.0).all()
    assert found.buffers == []
    assert noted_sums(3.0, 1.0) is None
    assert noted_sums(3.0, relaid=1.0) is None
    assert noted_sums(3.0, wants=False) is None


def test_an_update_is_compared_with_the_options_of_its_optimizer():
    """They differ a step before the weights do, where they are set behind the update."""
    state = build_state()
    before = hashes_after(state)
    assert first_unlike(before, hashes_after(state)) == ""
    state.optimizer.param_groups[0]["lr"] *= 2
    assert first_unlike(before, hashes_after(state)) == "lr of the optimizer's group 0"
    state.optimizer.param_groups[0]["lr"] /= 2
    next(state.model.parameters()).data.add_(1.0)
    assert first_unlike(before, hashes_after(state)) == next(iter(state.weights()))


def test_only_the_first_sum_of_a_step_is_noted():
    """What a body computes from that is of all ranks, as where it climbs along the gradient first."""
    state = small_state()
    notes = LoopNotes.of(state)
    parameter = next(state.model.parameters())
    notes.gradient(parameter, torch.ones_like(parameter))
    first = notes.share()
    notes.gradient(parameter, torch.zeros_like(parameter) + 2.0)
    assert notes.share() == first
    notes.begin_again()
    assert not notes.has(parameter)
    assert notes.share().gradients == {}


def test_no_drill_runs_a_program_as_rank_0():
    """Each of the others in turn; alone it has none."""
    assert [drilled_rank_of_loop(number, 3) for number in range(4)] == [1, 2, 1, 2]
    assert drilled_rank_of_loop(0, 1) is None


def test_a_file_that_was_edited_since_is_no_difference():
    """One that only one of the two has imported is the program's own choice."""
    assert changed_file({"a.py": "1", "b.py": "2"}, {"a.py": "1", "c.py": "3"}) == ""
    assert changed_file({"a.py": "1", "b.py": "2"}, {"a.py": "1", "b.py": "3"}) == "b.py"


def said(where, finding="", unlike=""):
    return json.dumps([where, finding, unlike])


class Steps:
    """The first steps of one rank of two, with the answer of the other."""

    def __init__(self, monkeypatch, other=""):
        self.said, self.reported = [], []
        monkeypatch.setattr(repeat_check, "report_inexact", lambda _, why: self.said.append(why))
        runtime = SimpleNamespace(
            slot=make_slot(), report=self.reported.append, rank_info=SimpleNamespace(rank=0)
        )
        self.state = small_state()
        self.state.is_rehearsed = False
        self.group = SimpleNamespace(
            rank=0,
            membership=SimpleNamespace(generation=1),
            exchange=lambda _, value: [value, said(other)],
        )
        settings = SimpleNamespace(stage=None)
        self.check = RepeatCheck(
            SimpleNamespace(state=self.state, settings=settings, runtime=runtime)
        )
        self.watched = WatchedStep(self.state, self.group, beside=(self.check,))

    def body(self, value):
        """A body whose gradients are all ``value``."""
        for parameter in self.state.model.parameters():
            self.watched.gradient(parameter, torch.full_like(parameter, value))

    def first(self, rehearsed, made):
        self.watched.begin([torch.ones(1)])
        self.body(rehearsed)
        self.watched.has_rehearsed()
        self.watched.begin([torch.ones(1)])
        self.body(made)
        self.commit()

    def commit(self, *, at_end=False):
        self.state.committed_step += 1
        self.state.is_rehearsed = True
        self.watched.end()
        self.check.after(self.state.committed_step, self.group, at_end=at_end)

    def more(self, count=4):
        for _ in range(count):
            self.watched.begin([])
            assert self.watched.gradient is None, "a later step is noted"
            self.commit()


def test_a_first_step_that_repeats_is_a_proof(monkeypatch):
    """Of all ranks, once."""
    steps = Steps(monkeypatch)
    steps.first(1.0, 1.0)
    steps.more()
    assert [(one.step, one.what) for one in steps.reported] == [(0, "repeated")]
    assert steps.said == []


@pytest.mark.parametrize("other", ["", "last.bias"])
def test_a_first_step_that_differs_is_said_once_nothing_explains_it(monkeypatch, other):
    """On this rank or another; a few steps later, when the loop's variables were looked at."""
    steps = Steps(monkeypatch, other)
    steps.first(1.0, 1.0 if other else 2.0)
    assert steps.said == steps.reported == []
    steps.more()
    [reason] = steps.said
    assert "the first step cannot be repeated: computed twice from the same state, " in reason
    assert ("last.bias differs on rank 1" in reason) is bool(other)


def test_an_iterator_that_steps_use_is_named_where_a_step_differs():
    """As of a second loader that the loss draws from; without it, what may be behind it is guessed."""
    answers = ["", "0.weight"]
    found = not_repeated(answers, unseen=["task.more (_SingleProcessDataLoaderIter)"])
    assert found.endswith(
        "on rank 1 (steps use task.more (_SingleProcessDataLoaderIter), which is kept nowhere)"
    )
    assert "in a global" in not_repeated(answers)
    assert "the samples differ on ranks 0-1 " in not_repeated(["the samples", "the samples"])


def test_a_variable_that_is_named_explains_a_first_step_that_differs(monkeypatch):
    """A counter, which is one step further when the first body is made again: a repair makes the run inexact."""
    steps = Steps(monkeypatch)
    steps.first(1.0, 2.0)
    steps.state.carried.append("`global_step` (train.py:3)")
    steps.more()
    assert steps.said == steps.reported == []


@pytest.mark.parametrize(("reporter", "is_said"), [(1, True), (0, False)])
def test_a_finding_is_reported_by_a_rank_that_knows_it(monkeypatch, reporter, is_said):
    """Rank 0 is another process since, and says nothing; the lowest of the others does, once."""
    steps = Steps(monkeypatch, "last.bias")
    steps.group.rank = 1
    steps.group.exchange = lambda _, value: [said("last.bias"), value]
    steps.first(1.0, 1.0)
    steps.group.membership = SimpleNamespace(generation=2)
    steps.group.exchange = lambda _, value: [said(None) if reporter else value, value]
    steps.more()
    assert len(steps.said) == is_said


def test_a_replacement_takes_part_in_what_the_others_know(monkeypatch):
    """It has no finding of its own, and is asked as they are."""
    steps, asked = Steps(monkeypatch), []
    steps.state.is_rehearsed = True  # as it was received
    steps.group.membership = SimpleNamespace(generation=2)
    steps.group.exchange = lambda name, value: asked.append(name) or [value, said(None, "why")]
    steps.more()
    assert len(asked) == 1
    assert steps.said == []


def test_a_first_step_is_compared_also_where_a_fault_interrupted_it(monkeypatch):
    """The ranks have rehearsed it again in the next generation."""
    steps = Steps(monkeypatch, "last.bias")
    steps.group.membership = SimpleNamespace(generation=2)
    steps.first(1.0, 2.0)
    steps.more()
    assert len(steps.said) == 1
    assert "cannot be repeated" in steps.said[0]


def test_ranks_of_a_lost_coordinator_take_part_in_a_first_step_again(monkeypatch):
    """A new one counts generations from 1, so that its own ranks have a first step, and those that stayed have none."""
    stayed, asked = Steps(monkeypatch), []
    stayed.first(1.0, 1.0)
    stayed.more()
    stayed.group.membership = SimpleNamespace(generation=1)
    stayed.group.exchange = lambda name, value: asked.append(name) or [said(NOT_DONE), value]
    stayed.more()
    assert len(asked) == 1
    assert [one.what for one in stayed.reported] == ["repeated"]


def test_what_a_step_is_surrounded_by_ends_with_its_generation(monkeypatch):
    """A body that was given up says nothing of the step that is made of the same batch."""
    seen = []

    class Beside:
        @contextlib.contextmanager
        def beside(self, stepper, group, micro_batches):
            assert micro_batches == ()
            with stepper.noted() as notes:
                yield
            seen.append(notes.share())

    state = small_state()
    watched = WatchedStep(state, None, beside=(Beside(),))
    parameter = next(state.model.parameters())
    for value in (1.0, 3.0):
        watched.begin([torch.full((2,), 5.0)])
        watched.gradient(parameter, torch.full_like(parameter, value))
    watched.end()
    watched.end()
    [share] = seen
    notes = LoopNotes.of(state)
    notes.gradient(parameter, torch.full_like(parameter, 3.0))
    assert share.gradients == notes.share().gradients
    assert len(share.samples) == 1
    assert watched.gradient is None


@pytest.mark.parametrize(
    ("rehearses", "how", "reported"),
    [
        (False, {}, False),
        (False, {"ranks": 1}, True),
        (False, {"drill_at": ()}, True),
        (False, {"layer": nn.SyncBatchNorm(1)}, True),
        (False, {"ranks": 1, "step": 1}, False),
        (True, {"ranks": 1}, False),
    ],
    ids=["drills", "one rank", "drills off", "no drills", "from the start", "rehearsed"],
)
def test_a_loop_that_nothing_proves_says_so(monkeypatch, rehearses, how, reported):
    """Once it goes on from a state: a loop that rehearses nothing, where no drill compares its steps."""
    how = {"ranks": 2, "drill_at": (2,), "layer": nn.Linear(1, 1), "step": 5, **how}
    said = []
    monkeypatch.setattr(repeat_check, "report_inexact", lambda _, why: said.append(why))
    monkeypatch.setattr(repeat_check, "report_repeated", lambda *_: None)
    parts = SimpleNamespace(
        state=SimpleNamespace(model=nn.Sequential(how["layer"]), carried=[]),
        settings=SimpleNamespace(stage=None, recovery=SimpleNamespace(drill_at=how["drill_at"])),
        workload=SimpleNamespace(length=SimpleNamespace(first_step=0)),
        runtime=SimpleNamespace(slot=make_slot()),
    )
    group = SimpleNamespace(
        rank=0,
        world_size=how["ranks"],
        membership=SimpleNamespace(generation=1),
        exchange=lambda _, value: [value],
    )
    RepeatCheck(parts, rehearses=lambda: rehearses).after(how["step"], group, at_end=False)
    assert [one.startswith("not proved") for one in said] == [True] * reported
