"""Ready objects: a model, loader and optimizer that a program has made, trained to the bits of its own loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ddp_runner import BadInputError, DDPTrainer, SafeDataLoader
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.training.components.lr_schedule import OwnRates
from tests import ready
from tests.training import plain_program

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("sgd", "adamw", "warmup", "sampler")


def run(way, kind, folder, *words, ranks=1, restarts=0, check=True):
    """The program in ``folder``, by itself or under torchrun; what it printed, and its weights by rank."""
    folder.mkdir(exist_ok=True)
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher += [f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    out = folder / way
    # Forks of the ready process: as of 30 starts, importing torch would be nearly all.
    forks = ready.environment(programs=True)
    done = subprocess.run(
        [*launcher, plain_program.__file__, way, kind, str(out), *words],
        cwd=folder,
        env={**os.environ, **forks, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    found = [torch.load(f"{out}.{rank}") for rank in range(ranks)] if done.returncode == 0 else []
    return done, found


def assert_equal(one, other):
    assert one.keys() == other.keys()
    different = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert different == []


@pytest.mark.parametrize("kind", KINDS)
def test_ready_objects_train_to_the_bits_of_a_plain_loop(kind, tmp_path):
    """Groups with rates of their own, schedulers by step and by epoch, and a sampler's own order."""
    _, (plain,) = run("plain", kind, tmp_path)
    done, (trained,) = run("trainer", kind, tmp_path)
    assert_equal(plain, trained)
    steps, _ = json.loads((tmp_path / "report_0.json").read_text())
    assert steps == 2 * (23 if kind == "sampler" else 24)
    assert "this process is not replaced: run the program again to resume from checkpoints/Net" in (
        done.stdout
    )
    assert done.stderr == ""
    summary = json.loads((tmp_path / "logs/Net/summary.json").read_text())
    assert (summary["exact"], summary["faults"]) == (True, [])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_two_ranks_of_torchrun_train_as_distributed_data_parallel(kind, tmp_path):
    """From rank 0's weights, whatever the others have drawn; the samples are shared out."""
    _, plain = run("plain", kind, tmp_path, ranks=2)
    done, trained = run("trainer", kind, tmp_path, ranks=2)
    assert_equal(plain[0], trained[0])
    assert_equal(trained[0], trained[1])
    assert "each of the 2 ranks takes its part of the samples" in done.stdout
    assert "the launcher's --max-restarts N starts all again" in done.stdout


def test_a_killed_rank_is_made_good_by_torchrun(tmp_path):
    """All start again, from the checkpoint, with the rates of that step."""
    _, (plain, _) = run("plain", "adamw", tmp_path, ranks=2)
    done, (trained, other) = run(
        "trainer", "adamw", tmp_path / "killed", "killing=rank", ranks=2, restarts=1
    )
    assert (tmp_path / "killed" / plain_program.KILLED).exists()
    assert_equal(plain, trained)
    assert_equal(trained, other)
    assert "resumed at step" in (tmp_path / "killed/logs/Net/rank_0.log").read_text(), done.stdout


def test_a_killed_program_resumes_where_it_is_run_again(tmp_path):
    """The scheduler and the groups' rates stand where they stood."""
    _, (plain,) = run("plain", "warmup", tmp_path)
    done, _ = run("trainer", "warmup", tmp_path, "killing=here", check=False)
    assert done.returncode == -9
    assert list((tmp_path / "checkpoints/Net").glob("step_*.pt"))
    _, (trained,) = run("trainer", "warmup", tmp_path, "killing=here")
    assert_equal(plain, trained)


def test_a_killed_loader_worker_is_replaced(tmp_path):
    """As with any run: no batch is lost, and the weights are the same."""
    _, (plain,) = run("plain", "sgd", tmp_path)
    _, (trained,) = run("trainer", "sgd", tmp_path, "killing=worker", "workers=1")
    assert (tmp_path / plain_program.KILLED).exists()
    assert_equal(plain, trained)
    assert "loader worker" in (tmp_path / "logs/Net/rank_0.log").read_text()


DATA = TensorDataset(torch.arange(40.0).reshape(40, 1) / 40, torch.arange(40.0).reshape(40, 1) / 20)
SHORT = {"epochs": 1, "device": "cpu", "save_interval": 0, "save_every_steps": 0, "display": "none"}


class Line(nn.Module):
    """Sees which samples come."""

    def __init__(self):
        super().__init__()
        self.line, self.other = nn.Linear(1, 1), nn.Linear(1, 1)
        self.seen = []

    def forward(self, x):
        self.seen += x.flatten().tolist()
        return self.line(x)

    @property
    def indices(self):
        return [round(one * 40) for one in self.seen]


def objects(model=None, loader=None, **more):
    model = model or Line()
    optimizer = more.pop("optimizer", None) or SGD(model.line.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=8) if loader is None else loader
    found = {"model": model, "train_loader": loader, "optimizer": optimizer}
    return {
        **found,
        **({} if {"criterion", "loss"} & more.keys() else {"loss": nn.MSELoss()}),
        **more,
    }


def trained(tmp_path, monkeypatch, config=None, **given):
    """The trainer of them, and its report."""
    monkeypatch.chdir(tmp_path)
    trainer = DDPTrainer(**objects(**given), config={**SHORT, **(config or {})})
    return trainer, trainer.train()


def test_what_the_optimizer_does_not_have_is_frozen_with_a_line(tmp_path, monkeypatch, capsys):
    """As in a loop by hand nothing of it changes; with the display, a person sees the lines."""
    model = Line()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    loader = DataLoader(DATA, batch_size=16, shuffle=True, generator=torch.Generator())
    trained(tmp_path, monkeypatch, {"display": "auto"}, model=model, loader=loader)
    said = capsys.readouterr().out
    assert "optimizer: 2 parameters are not in it, and are frozen\n" in said
    assert "an epoch leaves 8 samples out\n" in said
    assert "train_loader: run.seed decides the order, not its generator\n" in said
    assert torch.equal(before["other.weight"], model.other.weight)
    assert not torch.equal(before["line.weight"], model.line.weight)
    log = (tmp_path / "logs/Line/rank_0.log").read_text()
    assert "SGD, learning rate 0.1, gradients not clipped" in log
    assert " schedule " not in log


class Outer(nn.Module):
    """As of transformers: its output has the loss where labels are given."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x, labels=None):
        found = self.line(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Named:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x, y = DATA[index]
        return {"x": x, "labels": y}


@pytest.mark.parametrize("form", ["criterion", "loss", "function", "own"])
def test_each_way_to_give_the_loss_gives_the_same_weights(form, tmp_path, monkeypatch):
    """A function of outputs and targets, one of model and batch, or the model's own."""
    torch.manual_seed(3)
    model = Outer() if form == "own" else nn.Sequential(nn.Linear(1, 1))
    first = [one.detach().clone() for one in model.parameters()]
    ways = {
        "criterion": {"criterion": nn.MSELoss()},
        "loss": {"loss": nn.functional.mse_loss},
        "function": {"loss": lambda net, batch: (net(batch[0]) - batch[1]).square().mean()},
        "own": {"loss": None, "loader": DataLoader(Named(), batch_size=8)},
    }
    optimizer = SGD(model.parameters(), lr=0.1)
    trained(tmp_path, monkeypatch, model=model, optimizer=optimizer, **ways[form])
    weight, bias = first
    for begin in range(0, 40, 8):
        x, y = DATA.tensors[0][begin : begin + 8], DATA.tensors[1][begin : begin + 8]
        error = x @ weight.T + bias - y
        weight, bias = weight - 0.1 * (2 * error * x).mean(), bias - 0.1 * (2 * error).mean()
    found = [one.detach() for one in model.parameters()]
    torch.testing.assert_close(found, [weight, bias])


def test_a_model_without_a_loss_says_what_to_give(tmp_path, monkeypatch):
    """One line, with both words."""
    with pytest.raises(FaultError, match="has no loss: give criterion=, of outputs and targets"):
        trained(tmp_path, monkeypatch, loss=None, loader=DataLoader(DATA.tensors[0], batch_size=8))
    with pytest.raises(FaultError, match="called with the whole batch, a list"):
        trained(tmp_path, monkeypatch, loss=None)


def test_a_trainer_trains_once_and_says_so(tmp_path, monkeypatch):
    """A cell of a notebook that is run again gets the reason, and the way on."""
    trainer, _ = trained(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match="make a new DDPTrainer, which resumes"):
        trainer.train()


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (SequentialSampler(DATA), range(40)),
        (SubsetRandomSampler(range(10, 26)), set(range(10, 26))),
        (WeightedRandomSampler([0.0] * 20 + [1.0] * 20, 40), None),
        (WeightedRandomSampler([1.0] * 20 + [0.0] * 20, 16), None),
        (RandomSampler(DATA, num_samples=16, generator=torch.Generator().manual_seed(1)), None),
        (DistributedSampler(DATA, 1, 0, shuffle=False), range(40)),
        (BatchSampler(range(39, -1, -1), 8, drop_last=True), range(39, -1, -1)),
    ],
)
def test_each_sampler_gives_the_samples_that_it_gives(sampler, expected, tmp_path, monkeypatch):
    """Those of torch by what they mean; another epoch has another order, another run the same."""
    seen = []
    for name in ("one", "two"):
        is_batches = isinstance(sampler, BatchSampler)
        how = {"batch_sampler": sampler} if is_batches else {"sampler": sampler, "batch_size": 8}
        model = Line()
        config = {"name": name, "epochs": 2}
        trained(tmp_path, monkeypatch, config, model=model, loader=DataLoader(DATA, **how))
        seen.append(model.indices)
    assert seen[0] == seen[1]
    half = len(seen[0]) // 2
    first, second = seen[0][:half], seen[0][half:]
    if isinstance(expected, range):
        assert first == second == list(expected)
    else:
        assert first != second
    if isinstance(expected, set):
        assert set(first) == set(second) == expected
    if isinstance(sampler, WeightedRandomSampler):
        assert {index >= 20 for index in first} == {len(sampler) == 40}
        assert len(first) == len(sampler)


def test_a_safe_loader_keeps_its_own_order(tmp_path, monkeypatch):
    """That of its seed, epoch for epoch."""
    loader = SafeDataLoader(DATA, 8, shuffle=True, seed=5, drop_last=True)
    expected = [round(float(one) * 40) for _ in range(2) for x, _ in loader for one in x]
    model = Line()
    trained(tmp_path, monkeypatch, {"epochs": 2}, model=model, loader=loader)
    assert model.indices == expected


def test_what_a_loader_says_becomes_settings(tmp_path, monkeypatch):
    """Workers, time limit, collate and worker_init_fn; a word of the configuration may fill in what is not said."""

    def collate(samples):
        return tuple(torch.stack(part) * 2 for part in zip(*samples, strict=True))

    def begin(number):
        (tmp_path / f"began_{number}").touch()

    loader = DataLoader(
        DATA, batch_size=8, num_workers=1, prefetch_factor=3, timeout=40, collate_fn=collate,
        worker_init_fn=begin,
    )  # fmt: skip
    model = Line()
    validation = DataLoader(DATA, batch_size=20, sampler=SubsetRandomSampler([1, 2, 3]))
    trainer, report = trained(
        tmp_path, monkeypatch, {"max_steps": 2}, model=model, loader=loader, val_loader=validation
    )
    data = trainer.settings.data
    assert (data.batch_size, data.num_workers, data.prefetch_factor) == (8, 1, 3)
    assert (data.loader_timeout_s, data.evaluation_batch_size) == (40.0, 20)
    assert (tmp_path / "began_0").exists()
    tried, steps = model.indices[:3], model.indices[3:]  # an evaluation leaves nothing behind
    assert steps == [2 * index for index in range(16)]
    assert tried == [1, 2, 3]
    assert "validation_loss" in report.figures, report.figures
    trainer = DDPTrainer(
        **objects(loader=DataLoader(DATA)), config={**SHORT, "batch_size": 4, "num_workers": 2}
    )
    data = trainer.settings.data
    assert (data.batch_size, data.num_workers) == (4, 2)
    assert trainer.settings.optim.max_grad_norm is None
    assert trainer.settings.optim.precision == "fp32"


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def test_a_stream_is_read_as_it_comes(tmp_path, monkeypatch):
    """Its items in their order; it needs a length, or max_steps."""
    model = Line()
    loader = DataLoader(Stream(), batch_size=8)
    trained(tmp_path, monkeypatch, {"max_steps": 4}, model=model, loader=loader)
    assert model.indices == list(range(32))


def _of_two(**more):
    model = Line()
    optimizer = SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, **{k: v(optimizer) for k, v in more.items()}}


class OfOneRank(SequentialSampler):
    num_replicas = 1


REFUSED = [
    ({"model": nn.DataParallel(nn.Linear(1, 1))}, "return the module inside it: this run wraps it"),
    (
        {"optimizer": SGD(nn.Linear(1, 1).parameters(), 0.1)},
        "optimizer=SGD: has a parameter that is none of",
    ),
    ({"optimizer": SGD}, "optimizer=SGD: must be a torch.optim.Optimizer that was made"),
    (
        lambda: _of_two(optimizer=lambda one: LBFGS(one.param_groups[0]["params"])),
        "optimizer=LBFGS: asks",
    ),
    (
        lambda: _of_two(scheduler=lambda one: StepLR(one, 1)),
        "scheduler_interval: must say after what",
    ),
    (
        lambda: _of_two(scheduler=ReduceLROnPlateau),
        "scheduler=ReduceLROnPlateau: is optim.plateau_patience=N",
    ),
    (
        {"scheduler": StepLR(SGD(nn.Linear(1, 1).parameters(), 0.1), 1)},
        "must be of the optimizer that optimizer=",
    ),
    ({"scheduler_interval": "step"}, "scheduler_interval=step: needs scheduler="),
    ({"criterion": nn.MSELoss(), "loss": nn.MSELoss()}, "criterion: and loss= both say"),
    ({"loss": nn.Linear(1, 1)}, "criterion=Linear: has parameters to train"),
    ({"loss": None, "criterion": nn.MSELoss}, "criterion=MSELoss: must be a function, or made"),
    ({"train_loader": list(DATA)}, "train_loader=list: must be a DataLoader or a SafeDataLoader"),
    (
        {"train_loader": DataLoader(DATA, batch_size=None)},
        "train_loader: its dataset makes the batches itself",
    ),
    (
        {"train_loader": DataLoader(DATA, batch_sampler=[[0, 1], [2]])},
        "train_loader: its batch_sampler list makes",
    ),
    ({"train_loader": DataLoader(DATA, sampler=OfOneRank(DATA))}, "gives the samples of one rank"),
    (
        {"train_loader": DataLoader(DATA, num_workers=1, multiprocessing_context="spawn")},
        "train_loader: its workers are to be started by spawn",
    ),
    (
        {"train_loader": DataLoader(DATA, batch_size=8, sampler=DistributedSampler(DATA, 4, 1))},
        "its DistributedSampler is for 4 ranks, and there are 1",
    ),
    (
        {"val_loader": DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=3))},
        "val_loader: its sampler draws",
    ),
    (
        {"train_loader": None},
        "with model=, train_loader=, optimizer=, loss= it needs train_loader= as well",
    ),
    ({"config": {"lr": 0.5}}, "optim.learning_rate=0.5: optimizer= decides that"),
    (
        {"config": {"optim": {"schedule": "linear"}}},
        "optim.schedule=linear: optimizer= decides that",
    ),
    ({"config": {"batch_size": 4}}, "data.batch_size=4: the loader has 8"),
    ({"config": {"task": "bytes"}}, "task: is another way to say what is trained"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_taken_over_is_one_line(given, said, tmp_path, monkeypatch):
    """Before anything is trained or written, with what to give."""
    monkeypatch.chdir(tmp_path)
    given = given() if callable(given) else dict(given)
    config = {**SHORT, **given.pop("config", {})}
    with pytest.raises(BadInputError) as caught:
        DDPTrainer(**{**objects(), **given}, config=config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_word_that_is_none_is_answered_with_the_nearest():
    """As Python answers it, with the word that is meant."""
    with pytest.raises(TypeError, match=r"no train_dataloader=; did you mean train_loader=\?"):
        DDPTrainer(model=Line(), train_dataloader=DataLoader(DATA))
    with pytest.raises(TypeError, match="there is no task class"):
        DDPTrainer(Line, **objects())


def test_another_rate_on_resume_is_said_and_another_optimizer_refused(
    tmp_path, monkeypatch, capsys
):
    """The rates of the program hold, not those of the file."""
    config = {"max_steps": 3, "save_every_steps": 1, "display": "auto"}
    trained(tmp_path, monkeypatch, config)
    model = Line()
    faster = SGD(model.line.parameters(), lr=0.7)
    config |= {"max_steps": 4}
    trained(tmp_path, monkeypatch, config, model=model, optimizer=faster)
    assert "lr 0.1" in (said := capsys.readouterr().out), said
    assert "lr 0.7" in said
    assert faster.param_groups[0]["lr"] == 0.7
    other = torch.optim.Adam(model.line.parameters(), lr=0.7)
    with pytest.raises(BadInputError, match="SGD"):
        trained(tmp_path, monkeypatch, {**config, "max_steps": 5}, model=model, optimizer=other)


def test_rates_are_a_function_of_the_step():
    """Also where an older state is trained again, and where something has lowered them."""
    model = Line()
    groups = [{"params": model.line.parameters(), "lr": 0.0}, {"params": model.other.parameters()}]
    optimizer = SGD(groups, lr=1.0)
    scheduler = LambdaLR(optimizer, [lambda step: step, lambda step: 0.5**step])
    rates = OwnRates(optimizer, scheduler, every=2)
    found = {}
    for step in (0, 1, 2, 3, 7, 3, 0, 7):
        assert rates.lowered_at(step, factors=(0.5, 0.5)) == 0.0
        rates.apply()
        found.setdefault(step, set()).add(optimizer.param_groups[1]["lr"])
    assert found == {0: {0.25}, 1: {0.25}, 2: {0.125}, 3: {0.125}, 7: {0.03125}}


def test_a_parameter_group_that_training_adds_is_named():
    """A replaced rank would not have it."""
    model = Line()
    optimizer = SGD(model.line.parameters(), lr=1.0)
    rates = OwnRates(optimizer, None, every=1)
    optimizer.add_param_group({"params": list(model.other.parameters())})
    with pytest.raises(BadInputError, match="optimizer=SGD: was given another parameter group"):
        rates.apply()
