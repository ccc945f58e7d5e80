"""accelerate's Accelerator in place: as plain torchrun trains with it, also where ranks are lost. No hub, tiny models."""

from __future__ import annotations

import itertools
import json
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from tests.integrations.compared import (
    KILL,
    RAISE,
    WAIT,
    assert_as_saved_by,
    attached_alone,
    in_fp16,
    plant,
    run_by_torchrun,
    with_imported,
)
from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run, poll

accelerate = pytest.importorskip("accelerate", reason="not installed: the extra accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

from ddp_runner.integrations import accelerate as ours  # noqa: E402 - needs the library

FRAMEWORK = "accelerate"
LIKE_CLM = Path(__file__).with_name("accelerated.py")
LIKE_EXAMPLES = Path(__file__).with_name("accelerated_vision.py")

# --- whole runs ---


def run_script(folder, script, *words, ranks=2, options=(), **how):
    options = ("--preload", FRAMEWORK, "save_every_steps=5", *PATIENT, *options)
    places = ("-l", folder / "logs", "-c", folder / "checkpoints")
    how |= {"world": ranks, "task": None, "verb": "run", "launcher": with_imported(FRAMEWORK)}
    return Run(folder, *places, *options, script, *words, **how)


@pytest.mark.whole_run
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "model", ["tiny", pytest.param("gpt2", marks=pytest.mark.slow)], ids=["tiny", "gpt2"]
)
def test_ranks_are_lost_in_each_part_of_accumulated_steps(tmp_path, model):
    """In forward, backward, the update, an evaluation and amid save_state(), which a new rank 0 makes again."""
    if model == "gpt2":
        pytest.importorskip("transformers")
    words = ("accumulate", "short", model)
    run_by_torchrun(tmp_path / "plain", LIKE_CLM, *words, framework=FRAMEWORK)
    folder = tmp_path / "in_place"
    folder.mkdir()
    plant(
        folder,
        r0_s1_forward=KILL,
        r1_s3_update=KILL,
        r1_s5_backward=RAISE,
        r0_s6_save=KILL,
        r0_s8_evaluate=KILL,
    )
    with run_script(folder, LIKE_CLM, *words) as run:
        assert run.wait() == 0, run.console
    assert not [*folder.glob("harm_*")]
    assert_as_saved_by(folder, tmp_path / "plain")
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    assert len(summary["faults"]) == 5, summary["faults"]
    assert sum(one["steps_lost"] for one in summary["faults"]) == 0
    assert "not kept" not in run.console
    for step in range(2, 11, 2):
        saved, expected = (at / f"out/step_{step}" for at in (folder, tmp_path / "plain"))
        model = (saved / "model.safetensors").read_bytes()
        assert model == (expected / "model.safetensors").read_bytes()
        assert json.loads((saved / ours._MARK).read_text())["step"] == step


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "ranks", "kills"), [("tiny", 2, 30), ("gpt2", 2, 30), ("tiny", 3, 20)]
)
def test_kills_at_random_moments(tmp_path, model, ranks, kills):
    """Whichever rank is killed wherever in a step, no step is lost and the weights are those of a run without kills.

    With two ranks it is torchrun's; DDP itself rounds a mean of three gradients in another order.
    """
    folder, plain = tmp_path / "in_place", tmp_path / "plain"
    folder.mkdir()
    words, of_epoch = ("accumulate", "long", model), {2: 4, 3: 3}[ranks]  # steps
    dice, step = random.Random(f"{model}{ranks}"), 0
    for _ in range(kills):
        step += 1
        moments = ["forward", "backward", "update", "log"]
        moments += ["save"] * (step % 2 == 0) + ["evaluate"] * 4 * (step % of_epoch == 0)
        where = dice.choice(moments)
        rank = 0 if where == "save" else dice.randrange(ranks)
        plant(folder, **{f"r{rank}_s{step}_{where}": KILL})
        step += where == "update"  # which other ranks have made, and are alone with
    options = ("--max-restarts", "100")
    with run_script(folder, LIKE_CLM, *words, ranks=ranks, options=options) as run:
        assert run.wait(timeout_s=1500) == 0, run.console
    assert not [*folder.glob("harm_*")]
    if ranks == 2:
        run_by_torchrun(plain, LIKE_CLM, *words, framework=FRAMEWORK)
    else:
        plain.mkdir()
        with run_script(plain, LIKE_CLM, *words, ranks=ranks) as undisturbed:
            assert undisturbed.wait(timeout_s=600) == 0, undisturbed.console
    assert_as_saved_by(folder, plain, ranks)
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    assert len(summary["faults"]) == kills, summary["faults"]
    assert sum(one["steps_lost"] for one in summary["faults"]) == 0
    print(Counter(one.name.rpartition("_")[2] for one in folder.glob("done_*")))
    print(sorted(one["seconds"]["total"] for one in summary["faults"]))


@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_a_loop_without_accumulate_is_repaired_stopped_and_resumed(tmp_path):
    run_by_torchrun(tmp_path / "plain", LIKE_EXAMPLES, framework=FRAMEWORK)
    folder = tmp_path / "in_place"
    folder.mkdir()
    plant(folder, r0_s1_backward=KILL, r1_s4_update=KILL, r1_s8_backward=WAIT)
    with run_script(folder, LIKE_EXAMPLES) as run:
        poll((folder / "it_waits").exists, what="a step")
        run.signal(signal.SIGINT)
        assert run.wait() == ExitCode.INTERRUPTED, run.console
    plant(folder, r1_s12_backward=KILL)
    with run_script(folder, LIKE_EXAMPLES) as run:
        assert run.wait() == 0, run.console
    assert not [*folder.glob("harm_*")]
    assert_as_saved_by(folder, tmp_path / "plain")
    assert run.summary()["exact"], run.summary()["inexact_reasons"]
    assert "not kept" not in run.console


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [("seedable", "bf16"), ("early",), ("fp16",)], ids=" ".join)
def test_other_options_give_the_weights_of_torchrun(tmp_path, words):
    """An early stop takes no further step: its last one, by which the ranks agree, has no update."""
    run_by_torchrun(tmp_path / "plain", LIKE_EXAMPLES, *words, framework=FRAMEWORK)
    folder = tmp_path / "in_place"
    folder.mkdir()
    plant(folder, r0_s2_backward=KILL, r1_s7_update=RAISE)
    with run_script(folder, LIKE_EXAMPLES, *words) as run:
        assert run.wait() == 0, run.console
    assert_as_saved_by(folder, tmp_path / "plain")
    assert run.summary()["exact"], run.summary()["inexact_reasons"]


@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_ranks_that_mask_tokens_at_random_evaluate_alike(tmp_path):
    """A replaced rank too, whose loader workers are new: a loop stops early by these figures."""
    plant(tmp_path, r1_s23_forward=KILL)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,  # sockets of workers are left by kills
        run_script(tmp_path, LIKE_CLM, "masked", variables={"TMPDIR": short}) as run,
    ):
        assert run.wait() == 0, run.console
    assert run.summary()["exact"], run.summary()["inexact_reasons"]
    assert not [*tmp_path.glob("harm_*")]
    logs = [json.loads((tmp_path / f"history_{rank}.json").read_text()) for rank in range(2)]
    figures = [[one for one in log if isinstance(one, list)] for log in logs]
    assert len(figures[0]) == 3
    assert figures[1] == figures[0][2:]  # those of the process that came last


# --- in one process ---


@pytest.fixture(autouse=True)
def _forgotten():
    """accelerate's states are of the process; a test begins without those of another one."""
    shown = PartialState.use_distributed
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    PartialState.use_distributed = shown


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A run of one rank without a supervisor, which Accelerator is to take for one that repairs."""
    with attached_alone(tmp_path, monkeypatch, ours) as run:
        yield run


def trained(kind, *, epochs, accumulate=2, each_step=lambda accelerator: None, fused=None):
    """The weights that a loop over seven batches gives, and how often it saw an update. ``fused``: in fp16."""
    torch.manual_seed(5)
    precision = "no" if fused is None else "fp16"
    accelerator = kind(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    if fused is not None:
        in_fp16(accelerator)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    rows = torch.arange(42.0).reshape(14, 3) / 42
    loader = DataLoader(TensorDataset(rows), batch_size=2)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    counted = 0
    for _ in epochs(accelerator):
        for (batch,) in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(batch).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            counted += accelerator.sync_gradients
            if accelerator.sync_gradients:
                each_step(accelerator)
    bare = accelerator.unwrap_model(net)
    return [one.tolist() for one in bare.parameters()], counted, schedule.get_last_lr()


def test_without_a_supervisor_it_is_accelerator_itself():
    """With the one method more, which is range(), and stop()."""
    assert ours.RUN is None
    assert ours.Accelerator is ours._Plain
    accelerator = ours.Accelerator(cpu=True)
    assert isinstance(accelerator, accelerate.Accelerator)
    assert list(accelerator.epochs(3, max_steps=1)) == [0, 1, 2]
    accelerator.stop()
    assert list(accelerator.epochs(3)) == []


def test_the_repeated_first_body_is_counted_once_and_accumulated_as_ever(alone):
    """Seven batches of two a step: the last step of an epoch has one."""
    plain = trained(ours._Plain, epochs=lambda one: one.epochs(2))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    saved = []
    in_place = trained(
        ours._InPlace,
        epochs=lambda one: one.epochs(2),
        each_step=lambda one: saved.append(one.save_state(f"at_{alone.step_number}")),
    )
    assert in_place == plain
    assert plain[1] == 8
    assert len(saved) == 8
    assert json.loads(Path("at_8", ours._MARK).read_text()) == {"step": 8}


def test_the_start_of_an_epoch_outlives_a_repeated_body(alone):
    """Such as net.train() and a learning rate: the first body of a launch is repeated, and this code is not."""
    accelerator = ours._InPlace(cpu=True)
    net = nn.Linear(3, 1).eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    seen = []
    for epoch in accelerator.epochs(2):
        net.train()
        optimizer.param_groups[0]["lr"] = 0.1 + epoch
        for (batch,) in loader:
            seen.append((epoch, net.training, optimizer.param_groups[0]["lr"]))
            accelerator.backward(net(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
    assert seen == [(0, True, 0.1)] * 3 + [(1, True, 1.1)] * 2  # one body twice


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_steps_that_overflow_in_fp16_are_those_of_accelerate(alone, fused):
    """The loss scale, the weights and the schedule, which leaves such steps out unless the optimizer is fused."""
    scales = {ours._Plain: [], ours._InPlace: []}
    found = {}
    for kind, seen in scales.items():
        found[kind] = trained(
            kind,
            epochs=lambda one: one.epochs(4),
            each_step=lambda one, seen=seen: seen.append(one.scaler.get_scale()),
            fused=fused,
        )
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    assert found[ours._InPlace] == found[ours._Plain]
    assert scales[ours._InPlace] == scales[ours._Plain]
    changes = [b / a for a, b in itertools.pairwise(scales[ours._InPlace])]
    assert {0.5, 2.0} <= {*changes}
    assert len(changes) == 15
    assert alone.step_number == 16


def test_an_early_stop_ends_the_run_behind_the_epoch(alone):
    def epochs(accelerator):
        for epoch in accelerator.epochs(5):
            yield epoch
            accelerator.stop()

    assert trained(ours._InPlace, epochs=epochs)[1] == 4
    assert alone.has_ended


def test_a_rank_replaced_behind_an_early_stop_ends_too(alone):
    """It was lost in the evaluation that has decided the stop: the others end, and it begins no epoch."""

    def epochs(accelerator):
        for epoch in accelerator.epochs(5):
            yield epoch
            accelerator.stop()
            stopped = accelerator.state_dict()
            accelerator._stops = False
            accelerator.load_state_dict(stopped)

    assert trained(ours._InPlace, epochs=epochs)[1] == 4
    assert alone.has_ended


def test_max_steps_ends_the_loop_over_the_loader(alone):
    assert trained(ours._InPlace, epochs=lambda one: one.epochs(5, max_steps=6))[1] == 6


def prepared(**options):
    accelerator = ours._InPlace(cpu=True, **options)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)
    return accelerator, *accelerator.prepare(net, optimizer, loader)


def test_what_a_loop_may_not_do_is_said_in_one_line(alone):
    accelerator, net, _, loader = prepared()
    with pytest.raises(BadInputError, match=r"epochs\(N\).* comes before the loop"):
        next(iter(loader))
    with pytest.raises(BadInputError, match=r"accelerator.backward\(\)"):
        accelerator.backward(net(torch.ones(1, 3)).sum())
    with pytest.raises(BadInputError, match="2 models"):
        accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(BadInputError, match="skip_first_batches"):
        accelerator.skip_first_batches(loader, 1)
    accelerator.prepare(torch.optim.SGD(net.parameters(), lr=1.0))
    with pytest.raises(BadInputError, match="2 optimizers"):
        next(accelerator.epochs(1))


def test_a_loop_that_is_left_amid_an_epoch_is_refused(alone):
    accelerator, net, optimizer, loader = prepared()
    epochs = accelerator.epochs(3)
    next(epochs)
    for (batch,) in loader:
        accelerator.backward(net(batch).sum())
        with pytest.raises(BadInputError, match="between two steps"):
            accelerator.save_state("out")
        optimizer.step()
        if accelerator.sync_gradients:
            break
    with pytest.raises(BadInputError, match="left the loop over the loader"):
        next(epochs)


def test_a_manual_accumulation_is_refused(alone):
    accelerator, net, optimizer, loader = prepared(gradient_accumulation_steps=2)
    next(accelerator.epochs(1))
    for (batch,) in loader:
        accelerator.backward(net(batch).sum())
        with pytest.raises(BadInputError, match=r"accumulate\(model\)"):
            optimizer.step()
        break


def test_a_save_that_was_cut_off_is_made_again_by_its_state(alone):
    """As a replaced rank 0 gets it from the others; one that is whole is left alone."""
    accelerator, *_ = prepared()
    Path("cut").mkdir()
    accelerator.load_state_dict(
        {
            "between": json.dumps(
                {
                    "saved": {"step": 0, "given": "cut", "folder": "cut", "iteration": 0},
                    "iteration": 1,
                }
            )
        }
    )
    accelerator._save_again()
    written = Path("cut/model.safetensors").stat().st_mtime_ns
    accelerator._save_again()
    assert Path("cut/model.safetensors").stat().st_mtime_ns == written
    between = json.loads(accelerator.state_dict()["between"])
    assert (between["saved"]["folder"], between["iteration"]) == ("cut", 1)  # as on other ranks


@pytest.mark.parametrize("is_shared", [True, False], ids=["of the loader too", "of the sampler"])
def test_an_epoch_has_its_order_where_earlier_ones_were_not_drawn(is_shared):
    def loader():
        generator = torch.Generator().manual_seed(3)
        sampler = torch.utils.data.RandomSampler(range(9), generator=generator)
        return DataLoader(
            range(9), batch_size=1, sampler=sampler, generator=generator if is_shared else None
        )

    drawn = loader()
    expected = [[int(one) for one in drawn] for _ in range(3)]
    given = loader()
    given.base_dataloader, given.synchronized_generator = given, given.sampler.generator
    batches = ours._StepBatches(_with_epoch(given), 4)
    for epoch in (2, 0, 1):
        batches.set_epoch(epoch)
        found = [[int(one) for one in step] for step in batches]
        assert [one for step in found for one in step] == expected[epoch]
        assert [len(one) for one in found] == [4, 4, 1]


def _with_epoch(loader):
    loader.set_epoch = lambda epoch: None
    return loader


def test_accelerator_has_the_names_that_are_entered():
    """Of the installed version; what has moved is named."""
    assert ours._lacking() == []


def test_another_version_is_refused(alone, monkeypatch):
    monkeypatch.setattr(accelerate, "__version__", "1.9.0")
    with pytest.raises(BadInputError, match=r"accelerate>=1\.15,<2"):
        ours._InPlace(cpu=True)
