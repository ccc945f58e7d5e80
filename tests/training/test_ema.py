"""The moving average of the weights: formula, state, swapping, buffers."""

import io

import pytest
import torch
from torch import nn

from ddp_runner.training.components.ema import Ema


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    return model


def disturb(model):
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor))
        model[1].running_mean.add_(1.0)
        model[1].num_batches_tracked.add_(1)


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_average_follows_the_formula_with_warm_up():
    """After the first copy, update n mixes with min(decay, (1 + n) / (10 + n))."""
    model = nn.Linear(1, 1, bias=False).double()
    ema = Ema(model, 0.3)
    expected = None
    for n, weight in enumerate([1.0, 5.0, -2.0, 7.0, 7.5]):
        model.weight.data.fill_(weight)
        ema.update(model)
        decay = min(0.3, (1 + n) / (10 + n))
        expected = weight if expected is None else decay * expected + (1 - decay) * weight
    assert ema.updates == 4
    assert ema.state_dict()["parameters"]["weight"].item() == pytest.approx(expected, rel=1e-12)


def test_training_weights_are_never_changed_by_an_update():
    """Control: an update only reads the model."""
    model = build()
    ema = Ema(model, 0.9)
    for _ in range(3):
        disturb(model)
        before = values(model)
        ema.update(model)
        assert same(values(model), before)


def test_buffers_are_copied_and_infinite_masks_stay():
    """Statistics are the newest, an integer counter too, and -inf does not become NaN."""
    model = build()
    ema = Ema(model, 0.9)
    for _ in range(3):
        disturb(model)
        ema.update(model)
    buffers = ema.state_dict()["buffers"]
    assert set(buffers) == {"mask", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(buffers[name], model.state_dict()[name]) for name in buffers)


def test_a_buffer_that_the_module_assigns_again_is_followed():
    """A module may replace a buffer's tensor, as ``.to()`` does."""
    model = build()
    ema = Ema(model, 0.9)
    ema.update(model)
    model.mask = torch.tensor([5.0, 6.0])
    ema.update(model)
    assert ema.state_dict()["buffers"]["mask"].tolist() == [5.0, 6.0]


def test_swapping_in_leaves_the_training_weights_untouched():
    """Inside the block the average computes; the own memory is not written and comes back."""
    model = build()
    ema = Ema(model, 0.9)
    ema.update(model)
    disturb(model)
    ema.update(model)
    own, held = values(model), [p.detach() for p in model.parameters()]
    with ema.swapped_in(model):
        inside = values(model)
        assert torch.equal(inside["0.weight"], ema.state_dict()["parameters"]["0.weight"])
        assert not torch.equal(inside["0.weight"], own["0.weight"])
        assert all(
            torch.equal(a, own[n]) for a, (n, _) in zip(held, model.named_parameters(), strict=True)
        )
    assert same(values(model), own)
    assert [p.data_ptr() for p in model.parameters()] == [h.data_ptr() for h in held]


def test_swapping_in_gives_the_weights_back_after_an_error():
    """An evaluation that raises does not leave the average in the model."""
    model = build()
    ema = Ema(model, 0.9)
    ema.update(model)
    disturb(model)
    own = values(model)
    with pytest.raises(RuntimeError, match="evaluation"), ema.swapped_in(model):
        raise RuntimeError("evaluation")
    assert same(values(model), own)


def test_before_the_first_update_the_model_stands_for_itself():
    """Control: swapping in nothing changes nothing."""
    model = build()
    ema, own = Ema(model, 0.9), values(model)
    with ema.swapped_in(model):
        assert same(values(model), own)
    assert not ema.started


def test_training_goes_on_after_a_swap():
    """Gradients and the optimizer still reach the same parameters."""
    model = build()
    ema = Ema(model, 0.9)
    ema.update(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ema.swapped_in(model), torch.no_grad():
        model(torch.ones(4, 3))
    before = values(model)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_state_continues_exactly_and_is_a_plain_file():
    """Saved with torch.save and loaded with weights_only, later averages are the same bits."""
    model, other = build(), build()
    ema, restored = Ema(model, 0.9), Ema(other, 0.9)
    for _ in range(3):
        disturb(model)
        ema.update(model)
    file = io.BytesIO()
    torch.save(ema.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    other.load_state_dict(model.state_dict())
    for target in (model, other):
        torch.manual_seed(9)
        disturb(target)
    ema.update(model)
    restored.update(other)
    for part in ("parameters", "buffers"):
        assert same(ema.state_dict()[part], restored.state_dict()[part])
    assert ema.updates == restored.updates == 3


def test_the_state_of_an_average_that_has_not_started_can_be_loaded():
    """A run saved before its first step resumes without an average."""
    model = build()
    ema = Ema(model, 0.9)
    ema.load_state_dict(Ema(model, 0.9).state_dict())
    assert not ema.started


@pytest.mark.parametrize("other", [nn.Linear(3, 4), nn.Sequential(nn.Linear(2, 4))], ids=str)
def test_the_state_of_another_model_is_refused_and_changes_nothing(other):
    """Names and shapes must fit; the message names what differs."""
    model = build()
    ema, foreign = Ema(model, 0.9), Ema(other, 0.9)
    foreign.update(other)
    with pytest.raises(ValueError, match="weight"):
        ema.load_state_dict(foreign.state_dict())
    assert not ema.started


def test_half_precision_weights_are_averaged_in_float32():
    """At decay 0.999 bf16 could not move; swapped in, the model keeps its own dtype."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    ema = Ema(model, 0.999)
    model.weight.data.fill_(1.0)
    ema.update(model)
    ema.updates = 100_000  # past warm-up
    model.weight.data.fill_(1.0078125)
    ema.update(model)
    assert 1.0 < ema.state_dict()["parameters"]["weight"].item() < 1.0001
    with ema.swapped_in(model):
        assert model.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0])
def test_a_decay_outside_its_range_is_refused(decay):
    """0 and 1 are no averages."""
    with pytest.raises(ValueError, match="between 0 and 1"):
        Ema(nn.Linear(1, 1), decay)


def test_steps_that_are_averaged_are_those_of_a_loop_by_hand():
    """From step 5 on every third one, against torch's own averaged model in a loop."""
    model, decay = build(), 0.5
    ema = Ema(model, decay, every=3, start_step=5)

    def mix(average, live, count):
        share = min(decay, (1 + count) / (10 + count))
        return average * share + live * (1 - share)

    hand = None
    for step in range(1, 18):
        disturb(model)
        if ema.is_due(step):
            ema.update(model)
        if step < 5:
            assert not ema.started
        elif step == 5:
            hand = torch.optim.swa_utils.AveragedModel(model, avg_fn=mix)
            hand.update_parameters(model)  # the first one copies
        elif (step - 5) % 3 == 0:
            hand.update_parameters(model)
    assert ema.updates == 4
    own = ema.state_dict()["parameters"]
    for name, average in hand.module.named_parameters():
        torch.testing.assert_close(own[name], average.detach(), rtol=1e-6, atol=1e-6)


def test_an_average_of_every_step_is_what_it_always_was():
    """The control: without a word each step is taken in."""
    assert all(Ema(build(), 0.9).is_due(step) for step in range(1, 100))


def test_an_average_in_host_memory_has_the_same_bits():
    """On the CPU both places are one; a state goes from the one to the other."""
    model = build()
    same, host = Ema(model, 0.9), Ema(model, 0.9, device=torch.device("cpu"))
    for _ in range(4):
        disturb(model)
        same.update(model)
        host.update(model)
    assert repr(same.state_dict()) == repr(host.state_dict())
    other = Ema(model, 0.9)
    other.load_state_dict(host.state_dict())
    with other.swapped_in(model):
        swapped = values(model)
    with host.swapped_in(model):
        assert repr(swapped) == repr(values(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_average_of_weights_on_a_gpu_stays_in_host_memory():
    """Updates, restores and swaps leave it there; the model computes on its own device."""
    model = build().cuda()
    ema = Ema(model, 0.9, device=torch.device("cpu"))
    for _ in range(3):
        disturb(model)
        ema.update(model)
    ema.load_state_dict(ema.state_dict())
    assert {average.device.type for average in ema.averages()} == {"cpu"}
    with ema.swapped_in(model):
        assert {one.device.type for one in model.parameters()} == {"cuda"}
