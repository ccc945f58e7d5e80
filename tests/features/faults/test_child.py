"""What is injected into a step's loss, on a real model and a real board."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ddp_runner.core.injection import InjectKind, parse_injection
from ddp_runner.features.faults.child import InjectedError, InjectingSlot
from ddp_runner.features.faults.faulty_disk import FaultyDisk
from ddp_runner.kernel.rules.classify import classify_error
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.rules.phases import Moment, Phase
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell


class Bench:
    """A slot with injections, a model, and what was announced."""

    def __init__(self, *specs):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.announced = []
        self.slot = InjectingSlot(
            Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0),
            {number: parse_injection(spec, world_size=1) for number, spec in enumerate(specs)},
            announce=lambda number, kind: self.announced.append((number, kind)),
            loader_pids=tuple,
            disk=FaultyDisk(),
        )
        self._loss = self.slot.ruinous(lambda model, batch: model(batch).square().mean())

    def loss(self):
        """One micro-batch of the step in progress."""
        self.slot.stamp(Phase.FORWARD, 1)
        return self._loss(self.model, torch.ones(2, 4))

    def value(self):
        return float(self.loss().detach())

    def begin(self, step):
        self.slot.set(Cell.STEP, step)

    def commit(self):
        self.slot.set(Cell.COMMITTED_STEP, self.slot.get(Cell.STEP) + 1)


@pytest.mark.parametrize("kind", [InjectKind.NAN, InjectKind.SPIKE])
def test_a_ruined_loss_stays_so_until_its_step_is_committed(kind):
    """All micro-batches, and every redo, of that step; the next one, and an earlier one, are whole."""
    bench = Bench(f"{kind.value}:step=2")
    bench.begin(1)
    usual = bench.value()
    bench.commit()
    bench.begin(2)
    ruined = [bench.value() for _ in range(2)]
    bench.slot.set(Cell.COMMITTED_STEP, 2)  # as a new generation does, which redoes the step
    ruined.append(bench.value())
    bench.commit()
    again = []
    for step in (3, 2):  # the second after a roll-back
        bench.begin(step)
        again.append(bench.value())
    assert again == [usual, usual]
    assert bench.announced == [(0, kind)]
    if kind is InjectKind.NAN:
        assert all(math.isnan(loss) for loss in ruined)
    else:
        assert ruined == [pytest.approx(usual * 1e4)] * 3


def test_times_counts_steps():
    """Two ruined steps in a row, then none."""
    bench = Bench("nan:step=1,times=2")
    seen = []
    for step in range(4):
        bench.begin(step)
        seen.append(math.isnan(bench.value()))
        bench.commit()
    assert seen == [False, True, True, False]


@pytest.mark.parametrize(("begun", "seen"), [(2, [True, False]), (3, [False, False])])
def test_what_ruins_a_step_is_of_that_step(begun, seen):
    """A launch that is resumed within the steps ruins what is left of them, and one behind them nothing."""
    bench = Bench("nan:step=1,times=2")
    found = []
    for step in (begun, begun + 1):
        bench.begin(step)
        found.append(math.isnan(bench.value()))
        bench.commit()
    assert found == seen


def test_unused_leaves_the_last_module_out_of_the_graph_only():
    """Its parameters get no gradient, the others do, and all are trainable again afterwards."""
    bench = Bench("unused:step=0")
    bench.begin(0)
    bench.loss().backward()
    assert [p.grad is None for p in bench.model.parameters()] == [False, False, True, True]
    assert all(p.requires_grad for p in bench.model.parameters())
    bench.commit()
    bench.begin(1)
    bench.loss().backward()
    assert all(p.grad is not None for p in bench.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_diverge_flips_one_bit_of_one_weight(dtype):
    """Once, small enough to go unnoticed in the loss."""
    bench = Bench("diverge:step=0")
    bench.model.to(dtype)
    before = [p.detach().clone() for p in bench.model.parameters()]
    bench.begin(0)
    for _ in range(2):
        bench.slot.stamp(Phase.FORWARD, 1)
        bench._loss(bench.model, torch.ones(2, 4, dtype=dtype))
    differing = [
        (old.view(torch.uint8) ^ new.detach().view(torch.uint8)).flatten().tolist()
        for old, new in zip(before, bench.model.parameters(), strict=True)
    ]
    assert sum(bits.bit_count() for tensor in differing for bits in tensor) == 1
    new = next(bench.model.parameters()).detach()
    assert 0.25 < abs(float(new[0, 0] / before[0][0, 0])) < 4.0


@pytest.mark.parametrize(
    ("dtype", "bit"),
    [(torch.float32, 12), (torch.float32, 31), (torch.bfloat16, 12), (torch.float64, 44)],
)
def test_a_wrong_gradient_differs_in_one_bit_of_its_steps(dtype, bit):
    """Of the rank's own gradient, for as many steps as it was asked for; the loss and the weights show nothing."""
    bench = Bench(f"wrong_gradient:step=1,times=2,bit={bit}")
    bench.model.to(dtype)
    found, losses = [], []
    for step in range(4):
        bench.begin(step)
        bench.slot.stamp(Phase.FORWARD, 1)
        loss = bench._loss(bench.model, torch.ones(2, 4, dtype=dtype))
        bench.model.zero_grad()
        loss.backward()
        found.append([one.grad.view(torch.uint8).flatten() for one in bench.model.parameters()])
        losses.append(float(loss.detach()))
        bench.commit()
    bits = [
        [
            int(byte).bit_count()
            for was, now in zip(found[0], each, strict=True)
            for byte in was ^ now
        ]
        for each in found
    ]
    assert [sum(each) for each in bits] == [0, 1, 1, 0]
    size = torch.empty((), dtype=dtype).element_size()
    place = bit % (8 * size)
    flipped = found[0][0] ^ found[1][0]
    assert int(flipped[place // 8]) == 1 << place % 8, "of the first number"
    assert len(set(losses)) == 1


def test_hidden_state_stays_with_its_process():
    """From that step on, in training alone; it is announced once."""
    bench = Bench("hidden_state:step=1")
    seen = []
    for step in range(3):
        bench.begin(step)
        seen.append(bench.value())
        bench.commit()
    assert seen[1] == seen[2] == pytest.approx(1.25 * seen[0])
    assert bench.announced == [(0, InjectKind.HIDDEN_STATE)]
    bench.model.eval()
    assert bench.value() == seen[0]


def test_oom_is_a_refusal_of_the_system_and_passes():
    """A real allocation fails, as one that is too large does; the next try is let through."""
    bench = Bench("oom:step=1,phase=backward")
    bench.begin(1)
    with pytest.raises(RuntimeError) as raised:
        bench.slot.stamp(Phase.BACKWARD, 1)
    kind = classify_error(type_name="RuntimeError", text=str(raised.value), aborted=False)
    assert kind is FaultKind.OUT_OF_MEMORY
    bench.slot.stamp(Phase.BACKWARD, 2)


def test_a_random_injection_at_the_loss_waits_for_the_next_forward():
    """At any other moment the step would not see it."""
    bench = Bench()
    bench.begin(5)
    bench.slot.inject_soon(InjectKind.NAN, number=1)
    bench.slot.stamp(Phase.REDUCE, 1)
    bench.commit()
    bench.begin(6)
    assert math.isnan(bench.value())
    bench.commit()
    bench.begin(7)
    assert math.isfinite(bench.value())


def test_two_random_exceptions_at_one_step_are_two_errors():
    """The same error at the same step again would be the user's own, and end the run."""
    bench = Bench()
    bench.begin(5)
    said = []
    for number in (1, 2):
        bench.slot.inject_soon(InjectKind.RAISE, number=number)
        with pytest.raises(InjectedError) as raised:
            bench.slot.stamp(Phase.FORWARD, 1)
        said.append(str(raised.value))
    assert len(set(said)) == 2


@pytest.mark.parametrize("moment", list(Moment))
def test_a_moment_inside_a_phase_is_a_place_of_its_own(moment):
    """Nothing happens at the phases and moments around it."""
    bench = Bench(f"raise:step=3,phase={moment.value}")
    bench.begin(3)
    for phase in Phase:
        bench.slot.stamp(phase, 1)
    for other in Moment:
        if other is not moment:
            bench.slot.reach(other)
    with pytest.raises(InjectedError):
        bench.slot.reach(moment)
    bench.slot.reach(moment)


@pytest.mark.parametrize("kind", [InjectKind.LOADER_KILL, InjectKind.LOADER_STOP])
def test_what_is_done_to_a_loader_worker_waits_for_one(kind):
    """A rank that loads its samples itself has none: it is not said to have been caused."""
    bench = Bench(f"{kind.value}:step=0,phase=forward")
    bench.begin(3)
    bench.loss()
    assert bench.announced == []
