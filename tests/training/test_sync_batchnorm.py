"""Batch norm over ranks: as one batch of all of them, the same on each, and nobody late but who is."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell
from ddp_runner.training.components.sync_batchnorm import Peers, SyncedNorms
from tests.kernel.group.joining import CPU, join
from tests.processes import hosted_store, poll, ranks, results, run_ranks

SIZES = (3, 1, 4)  # samples of each rank: counts need not be alike


def make_slot():
    return Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)


def fresh_model(kind=nn.BatchNorm2d, **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 5, 3), kind(5, **options), nn.Tanh(), nn.Conv2d(5, 1, 3))
    if options.get("affine", True):
        nn.init.normal_(model[1].weight)
        nn.init.normal_(model[1].bias)
    return model.double()


def inputs_of(rank):
    generator = torch.Generator().manual_seed(rank)
    shift = 3.0 * rank
    return torch.randn(SIZES[rank], 2, 6, 6, generator=generator, dtype=torch.double) + shift


def results_of(model, inputs):
    """Output, gradients of the inputs and of the weights, and buffers, of a loss that is a sum."""
    inputs = inputs.requires_grad_()
    for _ in range(2):  # running statistics move twice
        model.zero_grad()
        inputs.grad = None
        output = model(inputs)
        output.pow(3).sum().backward()
    buffers = [buffer.clone() for buffer in model.buffers()]
    return output.detach(), inputs.grad, [p.grad for p in model.parameters()], buffers


def _together(me, port, kind, options):
    model = fresh_model(kind, **options)
    norms = SyncedNorms(model, is_wanted=True, device=CPU)
    slot = make_slot()
    slot.stamp(Phase.BACKWARD, 1)
    with join(me, port) as group:
        norms.peers = Peers(group=group, slot=slot)
        found = results_of(model, inputs_of(me.rank))
        assert slot.get(Cell.PHASE) == Phase.BACKWARD, "back where it was before it waited"
        model.eval()
        return (*found, model(inputs_of(0)).detach())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.BatchNorm2d, {}),
        (nn.SyncBatchNorm, {"momentum": None}),
        (nn.BatchNorm2d, {"affine": False, "track_running_stats": False}),
    ],
)
def test_ranks_compute_what_one_batch_of_all_does(kind, options):
    """Outputs, all gradients and statistics of plain batch norm over the concatenated batch."""
    world = len(SIZES)
    with hosted_store() as port:
        found = run_ranks(_together, world, port, kind, options)
    whole = fresh_model(nn.BatchNorm2d, **options)
    inputs = torch.cat([inputs_of(rank) for rank in range(world)])
    output, of_inputs, of_weights, buffers = results_of(whole, inputs)
    torch.testing.assert_close(torch.cat([one[0] for one in found]), output)
    torch.testing.assert_close(torch.cat([one[1] for one in found]), of_inputs)
    for number, gradient in enumerate(of_weights):
        torch.testing.assert_close(sum(one[2][number] for one in found), gradient)
    for number, buffer in enumerate(buffers):
        torch.testing.assert_close(found[0][3][number], buffer)
        assert all(torch.equal(one[3][number], found[0][3][number]) for one in found)
    whole.eval()
    torch.testing.assert_close(found[0][4], whole(inputs_of(0)).detach())


def _wait_in_a_layer(me, port):
    norms = SyncedNorms(model := nn.Sequential(nn.BatchNorm1d(4)), is_wanted=True, device=CPU)
    slot = make_slot()
    slot.stamp(Phase.FORWARD, 1)
    with join(me, port) as group:
        norms.peers = Peers(group=group, slot=slot)
        if me.rank == 1:
            me.hear()  # it is late
            assert slot.get(Cell.PHASE) == Phase.FORWARD
        else:

            def watch():
                poll(lambda: slot.get(Cell.PHASE) == Phase.REDUCE, timeout_s=20, what="a wait")
                me.say("waits")

            threading.Thread(target=watch, daemon=True).start()
        model(torch.randn(3, 4))
        return slot.get(Cell.PHASE)


def test_a_rank_that_waits_in_a_layer_is_not_late():
    """It stands as in a reduction until the other one has come, and in forward again after it."""
    with hosted_store() as port, ranks(_wait_in_a_layer, 2, port) as processes:
        assert processes[0].hear() == "waits"
        processes[1].say("go")
        assert results(processes) == [Phase.FORWARD, Phase.FORWARD]


def test_layers_with_a_forward_of_their_own_are_refused():
    """What such a layer does beside normalizing would be lost; torch's own classes are taken."""

    class WithAct(nn.BatchNorm1d):
        def forward(self, inputs):
            return super().forward(inputs).relu()

    model = nn.ModuleDict({"fine": nn.BatchNorm1d(2), "odd": WithAct(2)})
    with pytest.raises(BadInputError, match=r"odd \(WithAct\) has a forward of its own"):
        SyncedNorms(model, is_wanted=True, device=CPU)
    assert type(model["fine"]) is nn.BatchNorm1d, "nothing was touched"
    assert SyncedNorms(model, is_wanted=False, device=CPU).names == ()


def test_one_value_of_all_ranks_is_refused_as_by_torch():
    """There is no variance of one value; alone, a layer is torch's."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    twin = nn.Sequential(nn.BatchNorm1d(2))
    SyncedNorms(model, is_wanted=True, device=CPU)
    inputs = torch.randn(5, 2)
    assert torch.equal(model(inputs), twin(inputs))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(torch.randn(1, 2))
