"""Lightning's Trainer in place: as plain torchrun trains with it, also where ranks are lost."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import signal
import tempfile
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from tests.integrations.compared import (
    KILL,
    RAISE,
    WAIT,
    attached_alone,
    flat,
    plant,
    run_by_torchrun,
    with_imported,
)
from tests.scenarios.conftest import PATIENT, filled_once
from tests.scenarios.harness import Run, poll

pytest.importorskip("lightning", reason="not installed: the extra lightning")

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torchmetrics import MeanMetric

from ddp_runner.integrations import lightning as ours
from ddp_runner.integrations import lightning_private as private
from ddp_runner.integrations import lightning_values as values

SCRIPT = Path(__file__).with_name("fitted.py")
FRAMEWORK = "lightning.pytorch"
NEEDS = "accumulate midway bf16 early"

# --- whole runs ---


@pytest.fixture(scope="session")
def of_torchrun(tmp_path_factory, worker_id):
    """The folder in which plain torchrun and Lightning's own DDPStrategy have trained, by the words of the script."""

    def of(words):
        def make(folder):
            run_by_torchrun(folder, SCRIPT, *words.split(), framework=FRAMEWORK)

        return filled_once(tmp_path_factory, worker_id, make, ("lightning", words))

    return of


def run_script(folder, words, *, ranks=2, settings=(), **how):
    options = (
        "--max-restarts",
        99,
        "--preload",
        FRAMEWORK,
        "save_every_steps=9",
        *PATIENT,
        *settings,
    )
    places = ("-l", folder / "logs", "-c", folder / "checkpoints")
    how |= {"world": ranks, "task": None, "verb": "run", "launcher": with_imported(FRAMEWORK)}
    return Run(folder, *places, *options, SCRIPT, *words.split(), **how)


def assert_as_torchrun(folder, plain, ranks=2):
    """Weights, optimizer, counters, logged values, LR and files of all ranks."""
    for rank in range(ranks):
        found, expected = (
            dict(flat(torch.load(at / f"final_{rank}.pt", weights_only=False)))
            for at in (folder, plain)
        )
        assert [name for name in expected if found[name] != expected[name]] == []
        facts = [json.loads((at / f"facts_{rank}.json").read_text()) for at in (folder, plain)]
        assert facts[0] == facts[1]
    saved = [{one.name: one for one in (at / "best").iterdir()} for at in (folder, plain)]
    assert saved[0].keys() == saved[1].keys()
    for name, path in saved[0].items():
        own, other = (torch.load(one, weights_only=False) for one in (path, saved[1][name]))
        assert dict(flat(own["state_dict"])) == dict(flat(other["state_dict"]))
        assert (own["epoch"], own["global_step"]) == (other["epoch"], other["global_step"])


def assert_exact(run, faults):
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    assert len(summary["faults"]) == faults, summary["faults"]
    assert sum(one["steps_lost"] for one in summary["faults"]) == 0


@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_ranks_are_lost_and_the_weights_are_those_of_torchrun(tmp_path, of_torchrun):
    """In forward, backward, before the update, in a callback, amid saves and in validation."""
    plant(
        tmp_path,
        r0_s0_forward=KILL,
        r1_s2_optimizer=RAISE,
        r1_s4_callback=KILL,
        r1_s5_validation=KILL,
        r0_s5_save=KILL,
        r1_s7_backward=KILL,
        r0_s10_validation=KILL,
        r1_s10_save=RAISE,
    )
    with run_script(tmp_path, "") as run:
        assert run.wait() == 0, run.console
    assert not [*tmp_path.glob("harm_*")]
    assert_as_torchrun(tmp_path, of_torchrun(""))
    assert_exact(run, 8)
    assert [one.name for one in tmp_path.glob("csv/*/*")] == ["version_0"]


@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_kept_workers_of_a_validation_draw_the_same_after_a_repair(tmp_path):
    """Those of a replaced rank are new: what is saved, and where training ends, follows from these figures."""
    kept, plain = tmp_path / "kept", tmp_path / "plain"
    for folder in (kept, plain):
        folder.mkdir()
    plant(kept, r1_s7_forward=KILL)
    for folder in (kept, plain):
        with (
            tempfile.TemporaryDirectory(
                dir="/tmp"
            ) as short,  # sockets of workers are left by kills
            run_script(folder, "noisy", variables={"TMPDIR": short}) as run,
        ):
            assert run.wait() == 0, run.console
        assert_exact(run, folder is kept)
    assert_as_torchrun(kept, plain)


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_accumulated_steps_are_repaired_and_training_ends_early(tmp_path, of_torchrun):
    """With bf16, clipping and validation amid an epoch; a rank dies in the validation that ends training."""
    plant(
        tmp_path,
        r1_s1_forward=KILL,
        r0_s2_backward=KILL,
        r1_s2_save=KILL,
        r0_s3_optimizer=RAISE,
        r0_s4_validation=KILL,
    )
    with run_script(tmp_path, NEEDS) as run:
        assert run.wait() == 0, run.console
    assert not [*tmp_path.glob("harm_*")]
    assert_as_torchrun(tmp_path, of_torchrun(NEEDS))
    assert_exact(run, 5)


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_the_loss_scale_of_fp16_outlives_its_ranks(tmp_path, of_torchrun):
    """Both ranks are lost, among steps that overflow too."""
    plant(
        tmp_path,
        r0_s1_backward=KILL,
        r1_s3_callback=KILL,
        r1_s5_forward=RAISE,
        r0_s7_optimizer=KILL,
    )
    with run_script(tmp_path, "fp16") as run:
        assert run.wait() == 0, run.console
    assert not [*tmp_path.glob("harm_*")]
    assert_as_torchrun(tmp_path, of_torchrun("fp16"))
    assert_exact(run, 4)


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_a_run_that_loses_what_is_not_kept_says_so(tmp_path):
    """Once, with its name; the attributes that are kept are not named."""
    plant(tmp_path, r1_s4_forward=KILL)
    with run_script(tmp_path, "unkept") as run:
        assert run.wait() == 0, run.console
    assert run.console.count("`Net.recent` changes each step and is not kept") >= 1
    summary = run.summary()
    assert summary["exact"] is False
    (reason,) = summary["inexact_reasons"]
    assert "`Net.recent`" in reason


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_a_rank_that_hangs_in_validation_is_replaced(tmp_path, of_torchrun):
    """After the time limit of an evaluation; the other rank is late too, as it waits for the sum."""
    plant(tmp_path, r1_s5_validation="import time; time.sleep(900)")
    settings = ("recovery.evaluation_timeout_s=20",)
    with run_script(tmp_path, "", settings=settings) as run:
        assert run.wait(400) == 0, run.console
    assert_as_torchrun(tmp_path, of_torchrun(""))
    assert_exact(run, 1)


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_thirty_kills_at_random_leave_the_weights_of_torchrun(tmp_path, of_torchrun):
    """In each part of a step, in validation and in saves: no step is lost."""
    chance, places = random.Random(12), {}
    for step in sorted(chance.sample(range(1, 41), 30)):
        of_step = ("forward", "backward", "optimizer", "log", "callback")
        where = chance.choice(("save", "validation") if step % 5 == 0 else of_step)
        if where == "save" and step not in (5, 15):  # where torchrun saves
            where = "validation"
        places[f"r{chance.randrange(2)}_s{step}_{where}"] = KILL
    plant(tmp_path, **places)
    with run_script(tmp_path, "long") as run:
        assert run.wait(800) == 0, run.console
    assert not [*tmp_path.glob("harm_*")]
    assert_as_torchrun(tmp_path, of_torchrun("long"))
    assert_exact(run, 30)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_kills_of_three_ranks_leave_the_weights(tmp_path):
    """Of a run of ours: DDP itself rounds a mean of three gradients in another order."""
    killed, plain = tmp_path / "killed", tmp_path / "plain"
    chance, places = random.Random(3), {}
    for step in sorted(chance.sample(range(1, 32), 20)):
        of_step = ("forward", "backward", "optimizer", "log", "callback")
        where = "validation" if step % 4 == 0 else chance.choice(of_step)
        places[f"r{chance.randrange(3)}_s{step}_{where}"] = KILL
    for folder, planted in ((killed, places), (plain, {})):
        folder.mkdir()
        plant(folder, **planted)
        with run_script(folder, "long", ranks=3) as run:
            assert run.wait(800) == 0, run.console
        assert_exact(run, len(planted))
    assert not [*killed.glob("harm_*")]
    assert_as_torchrun(killed, plain, ranks=3)


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_a_run_is_stopped_and_the_same_command_resumes(tmp_path, of_torchrun):
    """By Ctrl-C amid the second epoch; then rank 0 is lost."""
    plant(tmp_path, r0_s6_forward=WAIT, r0_s8_backward=KILL)
    with run_script(tmp_path, "") as run:
        poll((tmp_path / "it_waits").exists, what="a step")
        run.signal(signal.SIGINT)
        assert run.wait() == ExitCode.INTERRUPTED, run.console
    with run_script(tmp_path, "") as run:
        assert run.wait() == 0, run.console
    assert_as_torchrun(tmp_path, of_torchrun(""))
    assert_exact(run, 1)


# --- in one process ---


def test_without_a_supervisor_it_is_lightnings_own_strategy():
    assert ours.RUN is None
    assert ours.InPlaceDDP is DDPStrategy


def test_lightning_has_the_names_that_are_used(monkeypatch):
    """Of the installed version; what has moved is named."""
    assert private.lacking() == []
    monkeypatch.delattr(private._EpochInPlace.__mro__[1], "_broadcast_sigterm_tensor")
    assert private.lacking() == ["_TrainingEpochLoop._broadcast_sigterm_tensor"]


@pytest.mark.parametrize(
    ("names", "stays"),
    [
        ([], False),
        (["hparams.yaml", f"events.out.tfevents.1.host.{os.getpid()}.0"], False),
        (["hparams.yaml", "metrics.csv"], True),
        ([f"events.out.tfevents.1.host.1{os.getpid()}.0"], True),
    ],
    ids=["empty", "of this process", "with rows", "of another process"],
)
def test_a_version_that_was_only_begun_is_removed(tmp_path, names, stays):
    """A replaced rank 0 goes on in that of the one before."""
    begun = tmp_path / "version_1"
    begun.mkdir()
    for name in names:
        (begun / name).touch()
    values.remove_begun(begun, None)
    assert begun.exists() is stays


class _Counting(LightningModule):
    def __init__(self):
        super().__init__()
        self.seen, self.outputs, self.opened = 0, [], open  # the last is no value


def test_attributes_are_kept_as_of_the_update_and_later_changes_apart():
    module = _Counting()
    kept = values.Attributes(module)
    module.seen, module.outputs = 3, [1.0]
    kept.hold()
    module.outputs.clear()
    assert kept.state_dict() == {"seen": 3, "outputs": [1.0]}
    assert kept.late() == {"outputs": []}
    other = _Counting()
    replaced = values.Attributes(other)
    replaced.load_state_dict(kept.state_dict())
    replaced.put(kept.late())
    assert (other.seen, other.outputs) == (3, [])
    kept.let_go()
    assert kept.state_dict() == {"seen": 3, "outputs": []}


def test_progress_is_one_text_with_its_tensors_apart():
    """For a replaced rank as it was: keys that are no texts, numbers that JSON has no word for, types."""
    between = {
        "callbacks": [{"state": {1: "a", 2: [torch.ones(2, dtype=torch.int8)]}}, {}],
        "logged": {"values": {"loss": torch.tensor(math.nan), "rate": math.inf}},
        "saved": ["x.ckpt"],
        "stops": False,
    }
    kept, other = (values.Progress(2, 3, torch.device("cpu")) for _ in range(2))
    kept.between = between
    kept.counted[1, 2] = 0.5
    other.load_state_dict(kept.state_dict())
    found = other.between
    assert other.counted[1, 2] == 0.5
    assert found["callbacks"][0]["state"][1] == "a"
    (tensor,) = found["callbacks"][0]["state"][2]
    assert (tensor.dtype, tensor.tolist()) == (torch.int8, [1, 1])
    assert math.isnan(found["logged"]["values"].pop("loss"))
    assert found["logged"]["values"] == {"rate": math.inf}
    assert (found["saved"], found["stops"]) == (["x.ckpt"], False)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_the_progress_of_loops_is_their_state_dict(alone):
    """To have Lightning copy it takes a quarter of the time that a step's copy takes."""
    loop = fitted(_Line(), devices=1).fit_loop
    assert json.loads(json.dumps(private.progress_of(loop), default=vars)) == loop.state_dict()
    assert loop.state_dict()["epoch_loop.batch_progress"]["total"]["completed"] == 20


class _Loader(list):
    """Seven batches."""

    dataset = ()


class _Combined:
    """As Lightning's, of one loader."""

    def __init__(self):
        self.flattened = [_Loader(range(7))]

    def __iter__(self):
        return ((batch, at, 0) for at, batch in enumerate(self.flattened[0]))


def test_the_last_step_of_an_epoch_has_the_batches_that_are_left():
    batches = private._StepBatches(_Combined(), 5, 2)
    assert len(batches) == 3
    assert [[one[0] for one in step] for step in batches] == [[0, 1], [2, 3], [4]]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A run of one rank without a supervisor, which the strategy is to take for one that repairs."""
    with attached_alone(tmp_path, monkeypatch, ours) as run:
        yield run


class _Line(LightningModule):
    """Notes what it hears; ``acc``, a torchmetrics object, is updated where ``counts``."""

    def __init__(self, *, counts=False, fused=None):
        super().__init__()
        self.fused = fused
        seed_everything(3)
        self.net = torch.nn.Linear(3, 1)
        self.counts, self.acc, self.events = counts, MeanMetric(), []
        self.counted = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if self.counts:
            self.counted(loss)
            self.log("counted", self.counted)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.events.append((batch_idx, self.trainer.global_step))

    def validation_step(self, batch, batch_idx):
        self.acc.update(self.net(batch[0]).mean())
        self.log("value", self.acc)

    def on_train_epoch_end(self):
        self.events.append("epoch")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=self.fused)


def fitted(module, *, accumulated=4, **how):
    """Return the Trainer that has trained it, on ten batches of two."""
    rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(rows)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=accumulated,
        use_distributed_sampler=False,  # which shuffles
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, **how},
    )
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    trainer.fit(module, loader, loader)
    return trainer


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_the_repeated_first_body_is_counted_and_logged_once(alone):
    """The weights, the values and the hooks' counters are those of Lightning itself."""
    plain, own = _Line(), _Line()
    expected, found = fitted(plain, devices=1), fitted(own, strategy=ours._InPlace())
    assert own.events == plain.events
    assert torch.equal(own.net.weight, plain.net.weight)
    assert found.global_step == expected.global_step == 6
    logged = {name: float(one) for name, one in found.callback_metrics.items()}
    assert logged == {name: float(one) for name, one in expected.callback_metrics.items()}
    assert alone.step_number == 6


class _Freezes(Callback):
    """Trains the bias from the second epoch on only."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net.bias.requires_grad_(trainer.current_epoch >= 1)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_what_an_epoch_begins_with_holds_in_a_repeated_body_too(alone):
    """The first body of a launch is repeated, and ``on_train_epoch_start()`` is not called again."""
    plain, own = _Line(), _Line()
    fitted(plain, devices=1, callbacks=[_Freezes()])
    fitted(own, strategy=ours._InPlace(), callbacks=[_Freezes()])
    assert torch.equal(own.net.bias, plain.net.bias)
    assert torch.equal(own.net.weight, plain.net.weight)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_a_fast_dev_run_has_no_log_folder(alone):
    fitted(_Line(), accumulated=1, strategy=ours._InPlace(), logger=True, fast_dev_run=1)
    assert alone.step_number == 1


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_steps_that_overflow_in_fp16_are_those_of_lightning(alone, fused):
    """The loss scale and the weights; the first scales are too high."""

    def trained(**how):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
        plugins = MixedPrecision("16-mixed", "cpu", scaler)
        module = _Line(fused=fused)
        return module, fitted(module, accumulated=1, plugins=plugins, **how).scaler.state_dict()

    (plain, expected), (own, found) = trained(devices=1), trained(strategy=ours._InPlace())
    assert torch.equal(own.net.weight, plain.net.weight)
    assert own.events == plain.events
    assert found == expected
    assert found["scale"] < 2.0**19
    assert alone.step_number == 20


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_metric_that_training_updates_is_counted_once(alone):
    """The first body, which is repeated, updates it twice."""
    plain, own = _Line(counts=True), _Line(counts=True)
    expected, found = fitted(plain, devices=1), fitted(own, strategy=ours._InPlace())
    values = [float(one.callback_metrics["counted"]) for one in (expected, found)]
    assert values[0] == values[1] > 0


class _Tally:
    """An object of a program's."""

    def __init__(self):
        self.rows, self.limit = [], 3


class _Holds(_Line):
    """Holds what no state has: some of it changes in training, and some does not."""

    def __init__(self):
        super().__init__()
        self.mean, self.table = np.zeros(2), np.arange(3.0)
        self.recent, self.tally = deque(maxlen=4), _Tally()
        self.kinds, self.names = {"a", "b"}, _Tally()
        self.rows = iter(range(99))
        self.seen = [0]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean = self.mean + 1
        self.recent.append(float(loss))
        self.tally.rows.append(batch_idx)
        self.seen.append(next(self.rows))
        return loss


class _Silent(Callback):
    """Has no state_dict()."""

    def __init__(self):
        self.calls, self.every, self.trainer, self.ends = 0, 2, None, []

    def setup(self, trainer, pl_module, stage):
        self.trainer, self.module = trainer, pl_module

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.calls += 1


class _Stops(EarlyStopping):
    """Counts what the state_dict() that it inherits leaves out."""

    steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1


class _Averages(Callback):
    """Averages the weights in a copy of the module, and changes an argument of the Trainer; without a state_dict()."""

    def on_fit_start(self, trainer, pl_module):
        self.average, self.teacher = copy.deepcopy(pl_module), copy.deepcopy(pl_module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.average.net.weight.lerp_(pl_module.net.weight, 0.1)
        trainer.gradient_clip_val = 1 / trainer.global_step


class _Stateful(_Silent):
    """Has one."""

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@pytest.mark.filterwarnings("ignore")  # as above
def test_what_changes_and_is_kept_nowhere_is_named_once(alone, tmp_path):
    """Not what stays as it was, what is kept, or Lightning's own objects."""
    callbacks = [_Silent(), _Averages(), _Stateful(), _Stops("value", patience=9)]
    options = {"callbacks": callbacks, "gradient_clip_val": 1.0}
    fitted(_Holds(), accumulated=1, strategy=ours._InPlace(), **options)
    held = ["mean", "recent", "rows", "tally"]
    assert sorted(alone._state.carried) == [
        "`_Averages.average`",
        *(f"`_Holds.{name}`" for name in held),
        "`_Silent.calls`",
        "`_Stops.steps`",
        "`trainer.gradient_clip_val`",
    ]


def test_what_users_keep_comes_back_as_it_was():
    """Through the one text of a run: tuples, keys of all kinds, and words that the text itself uses."""
    kept = {
        (1, 2): 3.5,
        "@tensor": 0,
        7: {"@pairs": [1], "deep": (None, True)},
        "inf": float("inf"),
    }
    given = {"callbacks": {"Mine": kept}, "late": {"shape": (2, (3, 4))}, "step": 5}
    progress = values.Progress(1, 1, torch.device("cpu"))
    progress.between = given
    other = values.Progress(1, 1, torch.device("cpu"))
    other.load_state_dict(progress.state_dict())
    assert other.between == given
    tensor = torch.arange(3.0)
    text, tensors = values._as_leaf({"callbacks": {"Mine": {"sums": [tensor]}}})
    (back,) = values._of_leaf(text, tensors)["callbacks"]["Mine"]["sums"]
    assert torch.equal(back, tensor)


class _Looks(Callback):
    """Sees what is kept of logged values."""

    def on_train_epoch_end(self, trainer, pl_module):
        kept = trainer.strategy._steps._logged.capture(is_late_refused=False)
        self.names = [[*values] for values in kept["values"].values()]


@pytest.mark.filterwarnings("ignore")  # as above
def test_logged_values_are_kept_alike_in_whatever_order_they_came(alone):
    looks = _Looks()
    fitted(_Line(counts=True), strategy=ours._InPlace(), callbacks=[looks])
    assert len(max(looks.names, key=len)) > 3
    assert looks.names == [sorted(one) for one in looks.names]


class _Cloning(_Line):
    """Copies a torchmetrics object in training, and writes another copy into a file."""

    def on_train_epoch_end(self):
        self.acc.update(2.0)
        torch.save(self.acc, "acc.pt")
        self.values = [float(self.acc.clone().compute()), float(self.acc.compute())]


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_metric_can_be_copied_and_written_in_training(alone):
    module = _Cloning()
    fitted(module, strategy=ours._InPlace())
    written = torch.load("acc.pt", weights_only=False)
    assert [float(written.compute()), *module.values] == [2.0] * 3
    assert b"ddp_runner" not in Path("acc.pt").read_bytes()


@pytest.mark.filterwarnings("ignore")  # as above
def test_what_a_module_keeps_is_not_named(alone):
    fitted(_Line(counts=True), accumulated=1, strategy=ours._InPlace(), callbacks=[_Stateful()])
    assert alone._state.carried == []


@pytest.mark.filterwarnings("ignore")  # as above
def test_manual_optimization_is_refused_before_the_first_step(alone):
    module = _Line()
    module.automatic_optimization = False
    with pytest.raises(BadInputError, match="automatic_optimization"):
        fitted(module, accumulated=1, strategy=ours._InPlace())
    assert module.events == []
