"""Each optimizer is torch's own, to the bit; two are one to the state; what torch lacks is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.codec import stored_bytes
from ddp_runner.cli import planning
from ddp_runner.cli.parser import parse_train
from ddp_runner.core.settings import OptimSettings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.step.session import Votes
from ddp_runner.training.components.optimizer import build_optimizer, bytes_to_come, take_in
from ddp_runner.training.saves.last_save import checkpoint_bytes
from ddp_runner.training.starting.fitting import misfit
from ddp_runner.values.generators import seed_step
from tests.kernel.group.joining import join
from tests.processes import hosted_store, run_ranks

from .building import (
    bits_of,
    build_model,
    build_replica,
    build_state,
    build_stepper,
    micro_batches,
)

CPU = torch.device("cpu")
NARROW = 24  # Muon multiplies matrices in bf16, where many processors take seconds for a wide one
COMMON = {"learning_rate": 0.02, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.95}
HAS_MUON = hasattr(torch.optim, "Muon")
needs_muon = pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon: it came with 2.9")
KINDS = ["adamw", "adam", "sgd", "adafactor", pytest.param("muon", marks=needs_muon)]


def made(**changes):
    return OptimSettings(**{**COMMON, **changes})


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(6, 4), nn.Conv1d(3, 3, 1), nn.Linear(4, 5), nn.Linear(5, 1))


def step(built, optimizers, number):
    for optimizer in optimizers:
        optimizer.zero_grad()
    numbers = torch.arange(6).reshape(2, 3).roll(number)
    built(numbers).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def groups_of(parameters, *, decay=0.3):
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def by_hand(kind, built):
    """What a person writes who has read torch's documentation."""
    every = list(built.parameters())
    betas = (0.8, 0.95)
    if kind == "adamw":
        return [torch.optim.AdamW(groups_of(every), lr=0.02, betas=betas, fused=True)]
    if kind == "adam":
        return [torch.optim.Adam(groups_of(every), lr=0.02, betas=betas, fused=True)]
    if kind == "sgd":
        return [torch.optim.SGD(groups_of(every), lr=0.02, momentum=0.9)]
    if kind == "adafactor":
        return [torch.optim.Adafactor(groups_of(every), lr=0.02)]
    matrices = [built[2].weight, built[3].weight]
    rest = [p for p in every if all(p is not one for one in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups_of(rest), lr=0.02, betas=betas, fused=True)]


def same_bits(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_each_optimizer_steps_as_torchs_own_does(kind):
    """Every bit of the weights after six steps; Muon has the matrices, but not the embedding's."""
    ours, theirs = model(), model()
    mine, hand = build_optimizer(ours, made(optimizer=kind), device=CPU), by_hand(kind, theirs)
    for number in range(6):
        step(ours, [mine], number)
        step(theirs, hand, number)
    assert same_bits(ours, theirs)
    assert not same_bits(ours, model())


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"optimizer": "sgd", "momentum": 0.5}, "momentum", 0.5),
        ({"optimizer": "adam", "epsilon": 1e-4}, "eps", 1e-4),
        ({"optimizer": "adamw", "epsilon": 1e-4}, "eps", 1e-4),
        ({"optimizer": "adamw"}, "eps", 1e-8),
        ({"optimizer": "adafactor", "epsilon": 1e-20}, "eps", (1e-20, 1e-3)),
        ({"optimizer": "sgd", "momentum": 0.0}, "fused", True),
        pytest.param({"optimizer": "muon", "momentum": 0.7}, "momentum", 0.7, marks=needs_muon),
        pytest.param({"optimizer": "muon", "epsilon": 1e-5}, "eps", 1e-5, marks=needs_muon),
    ],
)
def test_momentum_and_epsilon_are_given_on(settings, key, value):
    """As written; without a word it is torch's own epsilon."""
    groups = build_optimizer(model(), made(**settings), device=CPU).param_groups
    assert groups[0][key] == value


def test_momentum_of_a_parameter_that_is_used_late():
    """Control of a kernel of torch's: fused, SGD would break at its first gradient."""
    built = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = build_optimizer(built, made(optimizer="sgd"), device=CPU)
    built[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = built[1].weight.detach().clone()
    built[1](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, built[1].weight)


def advanced(kind, steps, **changes):
    torch.manual_seed(3)
    optim = made(optimizer=kind, **changes)
    state = build_state(optim=optim, model=build_model(NARROW))
    for number in range(steps):
        more(state, number)
    return state


def more(state, number):
    torch.manual_seed(number)
    inputs, targets, _ = micro_batches(number, 0)[0].batch
    state.optimizer.zero_grad()
    nn.functional.mse_loss(state.model(inputs), targets).backward()
    state.optimizer.step()
    state.ema.update(state.model)
    state.committed_step += 1
    state.buffers.keep()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_each_optimizer_goes_on_from_its_file(kind, tmp_path):
    """Saved, read as plain values, found to fit and restored: the next steps give equal bits."""
    source, other = advanced(kind, 4), advanced(kind, 1)
    assert stored_bytes(source.capture()) > 0
    torch.save(source.capture(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert misfit(saved, other) == ""
    other.restore(saved)
    assert bits_of(other) == bits_of(source)
    for state in (source, other):
        more(state, 9)
    assert bits_of(other) == bits_of(source)
    moments = [name for name in source.replicated() if name.endswith(")")]
    assert len(moments) >= len(list(source.model.parameters())), "all of them are compared"
    steady = {id(tensor) for tensor in source.steady_tensors()}
    assert all(id(source.replicated()[name]) in steady for name in moments)


def partly_frozen(kind):
    """Matrices of two layers are trained, and no vector is: groups of parameters come later."""
    torch.manual_seed(3)
    built = build_model(NARROW)
    for name, one in built.named_parameters():
        one.requires_grad_(name in ("3.weight", "5.weight"))
    return build_state(optim=made(optimizer=kind), model=built)


def unfreeze(state, *names):
    for name, one in state.named_parameters():
        one.requires_grad_(one.requires_grad or not names or name in names)
    state.train_unfrozen()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_before_an_unfreezing_can_be_gone_back_to(kind):
    """The optimizer has what it had then, and the steps from there on have the same bits again."""
    state = partly_frozen(kind)
    more(state, 0)
    before = copy.deepcopy(state.capture())
    at_first = bits_of(state)
    ends = []
    for _ in range(2):
        for number, names in enumerate((("0.weight", "0.bias"), ())):
            unfreeze(state, *names)
            more(state, number + 1)
        bits = bits_of(state)
        ends.append({**bits, "optimizer": bits["optimizer"]["state"]})
        assert misfit(before, state) == ""
        state.restore(copy.deepcopy(before))
        assert bits_of(state) == at_first
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_captured_amid_an_unfreezing_is_taken_over(kind):
    """Its source was freed after the forward that unfroze: what it updates comes along, without moments."""
    source, other = partly_frozen(kind), partly_frozen(kind)
    more(source, 0)
    source.model[0].requires_grad_(True)
    captured = copy.deepcopy(source.capture())
    assert misfit(captured, other) == ""
    other.restore(captured)
    source.train_unfrozen()
    for state in (source, other):
        more(state, 1)
    assert bits_of(other) == bits_of(source)


def test_a_state_without_a_parameter_that_is_trained_is_a_misfit():
    """Control: one that its own flags do not say was unfrozen."""
    source, other = partly_frozen("adamw"), partly_frozen("adamw")
    more(source, 0)
    captured = copy.deepcopy(source.capture())
    other.model[0].requires_grad_(True)
    captured["optimizer_names"] = captured["optimizer_names"][:-1]
    assert "of other parameters" in misfit(captured, other)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_and_is_frozen_again_keeps_its_moments(kind):
    """Also in a process that has never trained it."""
    source, other = partly_frozen(kind), partly_frozen(kind)
    unfreeze(source)
    more(source, 0)
    source.model[0].requires_grad_(False)
    other.restore(copy.deepcopy(source.capture()))
    assert bits_of(other) == bits_of(source)
    for state in (source, other):
        unfreeze(state)
        more(state, 1)
    assert bits_of(other) == bits_of(source)


def test_a_moment_of_another_shape_is_a_misfit():
    """Control: rows' and columns' alone fit, and nothing else that has other sizes does."""
    source, other = advanced("adafactor", 2), advanced("adafactor", 1)
    broken = copy.deepcopy(source.capture())
    entry = next(one for one in broken["optimizer"]["state"].values() if "row_var" in one)
    entry["row_var"] = entry["row_var"][:2]
    assert "row_var of" in misfit(broken, other)


@needs_muon
def test_what_is_unfrozen_goes_to_the_part_that_trains_it():
    """A matrix to Muon and a bias to AdamW, in the model's order, also where a part had nothing."""
    built = model()
    for one in built.parameters():
        one.requires_grad_(False)
    built[3].weight.requires_grad_(True)
    optimizer = build_optimizer(built, made(optimizer="muon"), device=CPU)
    built.requires_grad_(True)
    take_in(optimizer, built)
    muon, adamw = optimizer.parts
    assert [id(p) for g in muon.param_groups for p in g["params"]] == [
        id(built[2].weight),
        id(built[3].weight),
    ]
    decayed = [g for g in adamw.param_groups if g["params"] and g["weight_decay"]]
    assert [id(p) for g in decayed for p in g["params"]] == [
        id(built[0].weight),
        id(built[1].weight),
    ]
    hand = model()
    step(built, [optimizer], 0)
    step(hand, by_hand("muon", hand), 0)
    assert same_bits(built, hand)


@pytest.mark.parametrize(
    ("kind", "built", "message"),
    [
        pytest.param("muon", nn.Embedding(3, 2), "has no matrix", marks=needs_muon),
        ("adafactor", nn.Linear(2, 2, dtype=torch.complex64), "no complex parameters"),
    ],
)
def test_what_an_optimizer_cannot_train_is_bad_input(kind, built, message):
    """One line that names the setting and what to take instead."""
    with pytest.raises(BadInputError, match=rf"optim\.optimizer={kind}: .*{message}.*take adamw"):
        build_optimizer(built, made(optimizer=kind), device=CPU)


def test_muon_is_refused_where_torch_lacks_it(monkeypatch, tmp_path):
    """By the command, which looks at torch's files before anything starts, and where it is built."""
    monkeypatch.chdir(tmp_path)
    words = ["--cpu", "-n", "1", "optimizer=muon"]
    monkeypatch.setattr(planning, "torch_has", lambda module: module != "optim._muon")
    with pytest.raises(BadInputError, match=r"optim\.optimizer=muon: torch .* came with 2\.9"):
        planning.plan_launch(parse_train(words), words=words)
    monkeypatch.undo()
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(BadInputError, match=r"optim\.optimizer=muon: torch .* came with 2\.9"):
        build_optimizer(model(), made(optimizer="muon"), device=CPU)


def test_the_command_finds_muon_where_torch_has_it():
    """The control: its files say the same as torch itself."""
    assert planning.torch_has("optim._muon") is HAS_MUON


def _clipped(me, port, norm, value):
    optim = made(
        optimizer="sgd", momentum=0.0, max_grad_norm=norm, max_grad_value=value, warmup_steps=0
    )
    state = build_state(optim=optim)
    hand = copy.deepcopy(state.model)
    with join(me, port) as group:
        replica = build_replica(state, group)
        stepper = build_stepper(state, replica, rank=0, world_size=1, optim=optim)
        result = stepper.run(micro_batches(0, 0), votes=Votes())
        gradients = [p.grad.clone() for p in state.model.parameters()]
    return result.grad_norm, gradients, hand, optim


@pytest.mark.parametrize(("norm", "value"), [(0.5, 0.01), (None, 0.05), (0.5, None)])
def test_gradients_are_clipped_as_by_torch(norm, value):
    """By norm, then by value; the norm that is watched is the one before both."""
    with hosted_store() as port:
        ((found, clipped, hand, _),) = run_ranks(_clipped, 1, port, norm, value)
    torch.manual_seed(0)
    hand.train()
    raw_norm, expected = hand_gradients(hand, clipped, norm, value)
    assert found == pytest.approx(raw_norm, rel=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(clipped, expected, strict=True))


def hand_gradients(hand, clipped, norm, value):
    """Of the loss by hand, with the dropout of the step."""
    seed_step(seed=7, step=0, rank=0, micro_step=0)
    inputs, targets, _ = micro_batches(0, 0)[0].batch
    nn.functional.mse_loss(hand(inputs), targets).backward()
    parameters = list(hand.parameters())
    raw = float(nn.utils.get_total_norm([p.grad for p in parameters]))
    if norm is not None:
        nn.utils.clip_grad_norm_(parameters, norm)
    if value is not None:
        nn.utils.clip_grad_value_(parameters, value)
    return raw, [p.grad for p in parameters]


@pytest.mark.parametrize("momentum", ["auto", 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_optimizer_will_keep_is_known_before(kind, momentum):
    """But for counters of steps, which are a number for each parameter."""
    built = model()
    built[3].weight.requires_grad_(False)
    optimizer = build_optimizer(built, made(optimizer=kind, momentum=momentum), device=CPU)
    expected = bytes_to_come(optimizer)
    step(built, [optimizer], 0)
    kept = [one for entry in optimizer.state.values() for one in entry.values()]
    tensors = [one for one in kept if isinstance(one, torch.Tensor) and one.ndim]
    assert expected == sum(one.numel() * one.element_size() for one in tensors)


def test_the_size_of_a_checkpoint_is_known_before_the_first_step():
    """With what optimizer and average will hold: within a tenth of what it is afterwards."""
    state = build_state()
    before = checkpoint_bytes(state)
    state.model(torch.ones(4, 6)).sum().backward()
    state.optimizer.step()
    state.ema.update(state.model)
    assert before == pytest.approx(checkpoint_bytes(state), rel=0.1)
    assert checkpoint_bytes(build_state(ema=False)) < 0.8 * before
