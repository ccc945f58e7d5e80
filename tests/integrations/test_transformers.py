"""transformers' Trainer in place: as plain torchrun trains with it, also where ranks are lost. No hub, tiny models."""

from __future__ import annotations

import copy
import inspect
import json
import random
import re
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest
import torch

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.wire.messages import Metrics
from tests.integrations.compared import (
    KILL,
    RAISE,
    WAIT,
    attached_alone,
    flat,
    in_fp16,
    plant,
    run_by_torchrun,
    with_imported,
)
from tests.scenarios.conftest import PATIENT, filled_once
from tests.scenarios.harness import Run, poll

transformers = pytest.importorskip("transformers", reason="not installed: the extra transformers")
pytest.importorskip("accelerate", reason="not installed: the extra transformers")

from tokenizers import Tokenizer  # noqa: E402 - comes with the library
from tokenizers.models import WordLevel  # noqa: E402 - as above

from ddp_runner.integrations import transformers as ours  # noqa: E402 - needs the library
from ddp_runner.integrations.transformers_progress import (  # noqa: E402 - as above
    Progress,
    _names_of,
    without_durations,
)

SCRIPT = Path(__file__).with_name("trained.py")
FRAMEWORK = "transformers.trainer"
NEEDS = "accumulate cosine best predict"
IN_FP16 = "fp16 accumulate cosine evaluate"
FINE_TUNING = "early best lora bf16 checkpointing own_loader predict"

# --- whole runs ---


def saved_by(folder, ranks=2):
    """Return what each rank has at its end: tensors, and the facts that Trainer gives."""
    found = []
    for rank in range(ranks):
        state = torch.load(folder / f"final_{rank}.pt", weights_only=False)
        facts = (folder / f"facts_{rank}.json").read_text()
        facts = json.loads(facts, parse_constant=str)  # NaN differs from itself
        found.append((dict(flat(state)), facts))
    return found


@pytest.fixture(scope="session")
def of_torchrun(tmp_path_factory, worker_id):
    """What plain torchrun and transformers' own Trainer save, by the words of the script; it lies in a folder."""

    def of(words, ranks=2):
        def make(folder):
            run_by_torchrun(folder, SCRIPT, *words.split(), framework=FRAMEWORK, ranks=ranks)

        return filled_once(tmp_path_factory, worker_id, make, ("torchrun", words, str(ranks)))

    return of


def run_script(folder, words, *settings, ranks=2, **how):
    options = ("--preload", FRAMEWORK, "save_every_steps=9", *settings, *PATIENT)
    options += ("--max-restarts", "100")
    places = ("-n", str(ranks), "-l", folder / "logs", "-c", folder / "checkpoints")
    by_name = ["--in-place"] if "by_name" in words else []
    words = [*by_name, SCRIPT, *words.split()]
    how |= {"task": None, "verb": "run", "launcher": with_imported(FRAMEWORK)}
    return Run(folder, *places, *options, *words, **how)


def assert_as_torchrun(folder, plain, ranks=2):
    for (state, facts), (expected, expected_facts) in zip(
        saved_by(folder, ranks), saved_by(plain, ranks), strict=True
    ):
        assert facts == expected_facts
        assert [k for k in expected if state[k] != expected[k]] == []
        assert state.keys() == expected.keys()


@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_ranks_are_lost_and_the_weights_are_those_of_torchrun(tmp_path, of_torchrun):
    """In forward, between micro-batches' tokens and update, evaluating, amid a save; logs, best and FLOS too."""
    plant(
        tmp_path,
        r0_s1_forward=KILL,
        r1_s2_update=RAISE,
        r0_s4_save=KILL,
        r1_s5_forward=RAISE,
        r0_s6_evaluate=KILL,
    )
    with run_script(tmp_path, NEEDS) as run:
        assert run.wait() == 0, run.console
    assert not [*tmp_path.glob("harm_*")]
    assert_as_torchrun(tmp_path, plain := of_torchrun(NEEDS))
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    assert len(summary["faults"]) == 5, summary["faults"]
    assert sum(one["steps_lost"] for one in summary["faults"]) == 0
    folders = [sorted(one.name for one in (at / "out").iterdir()) for at in (tmp_path, plain)]
    assert all((tmp_path / "out" / one / "trainer_state.json").exists() for one in folders[0])
    assert folders[0] == folders[1] == ["checkpoint-2", "checkpoint-6"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_scale_of_fp16_outlives_its_ranks(tmp_path, of_torchrun):
    """Both ranks are lost, among steps that overflow too."""
    plant(
        tmp_path, r0_s1_backward=KILL, r1_s3_update=KILL, r1_s5_forward=RAISE, r0_s6_callback=KILL
    )
    with run_script(tmp_path, IN_FP16) as run:
        assert run.wait() == 0, run.console
    assert not [*tmp_path.glob("harm_*")]
    assert_as_torchrun(tmp_path, of_torchrun(IN_FP16))
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    assert sum(one["steps_lost"] for one in summary["faults"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fine_tuning_is_stopped_resumed_and_ends_early(tmp_path, of_torchrun):
    """Adapters, bf16, recomputed activations; Ctrl-C, then rank 0 lost in the save before the end."""
    pytest.importorskip("peft")
    plant(tmp_path, r0_s1_forward=WAIT, r1_s3_forward=KILL, r0_s4_save=KILL)
    with run_script(tmp_path, FINE_TUNING) as run:
        poll((tmp_path / "it_waits").exists, what="a step")
        run.signal(signal.SIGINT)
        assert run.wait() == ExitCode.INTERRUPTED, run.console
    with run_script(tmp_path, FINE_TUNING) as run:
        assert run.wait() == 0, run.console
    assert not [*tmp_path.glob("harm_*")]
    assert_as_torchrun(tmp_path, of_torchrun(FINE_TUNING))
    assert run.summary()["exact"], run.summary()["inexact_reasons"]


@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_a_script_that_is_unchanged_is_drilled_and_resumed(tmp_path, of_torchrun):
    """A drill gets the count of tokens of all ranks; what `run --in-place` imports first has the script's own words.

    A callback averages the weights.
    """
    plant(tmp_path, r0_s1_forward=WAIT, r1_s3_forward=KILL)
    words, drills = "by_name evaluate average", ("drill_at=3", "recovery.proof_share=0")
    with run_script(tmp_path, words, *drills) as run:
        poll((tmp_path / "it_waits").exists, what="a step")
        run.signal(signal.SIGINT)
        assert run.wait() == ExitCode.INTERRUPTED, run.console
    with run_script(tmp_path, words, *drills) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    assert summary["exact_proof"]["repairs_proved"] == "1 of 1", run.console
    assert_as_torchrun(tmp_path, of_torchrun(words))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("words", "is_known"), [("stream short by_name", True), ("grouped", False)]
)
def test_other_orders_of_data_survive_a_kill(tmp_path, of_torchrun, words, is_known):
    """A stream is shared out as under torchrun; `--in-place` finds the Trainer of a script that imports it by name.

    Groups by length are drawn in an order that only the run has.
    """
    kept, plain = tmp_path / "kept", tmp_path / "plain"
    for folder in (kept, plain):
        folder.mkdir()
    plant(kept, r1_s2_forward=KILL, r0_s5_backward=KILL)
    with run_script(kept, words) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["exact"], run.summary()["inexact_reasons"]
    assert len(run.summary()["faults"]) == 2
    if is_known:
        assert_losses_of_torchrun(kept, of_torchrun(words))
        return
    with run_script(plain, words) as run:
        assert run.wait() == 0, run.console
    assert_as_torchrun(kept, plain)


@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_ranks_that_mask_tokens_at_random_evaluate_alike(tmp_path):
    """A replaced rank too, whose loader workers are new: ranks stop early and take the best weights by these figures."""
    words = "masked persistent best grouped"  # by length, also where it evaluates
    kept, plain = tmp_path / "kept", tmp_path / "plain"
    for folder in (kept, plain):
        folder.mkdir()
    plant(kept, r1_s3_forward=KILL, r0_s5_update=KILL)
    for folder in (kept, plain):
        with (
            tempfile.TemporaryDirectory(
                dir="/tmp"
            ) as short,  # sockets of workers are left by kills
            run_script(folder, words, variables={"TMPDIR": short}) as run,
        ):
            assert run.wait() == 0, run.console
        assert run.summary()["exact"], run.summary()["inexact_reasons"]
    assert not [*kept.glob("harm_*")]
    assert_as_torchrun(kept, plain)
    histories = [facts["history"] for _, facts in saved_by(kept)]
    assert histories[0] == histories[1]


def assert_losses_of_torchrun(folder, plain):
    """Compare all but Trainer's count of epochs: a stream's passes are one epoch."""
    for (state, facts), (expected, others) in zip(saved_by(folder), saved_by(plain), strict=True):
        assert [k for k in expected if state[k] != expected[k]] == []
        logged = [[one.get("loss") for one in each["history"]] for each in (facts, others)]
        assert logged[0] == logged[1]


MOMENTS = ("forward", "backward", "update", "callback", "log", "evaluate", "save")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3])
def test_fifteen_kills_at_random_moments(tmp_path, of_torchrun, ranks):
    """Whichever rank is killed wherever in a step, weights and logs are those of torchrun, or of a run without kills."""
    words = "accumulate cosine best long"
    dice = random.Random(ranks)
    late = -1  # the rank whose replacement begins behind the callbacks of its next step
    for step in range(1, 16):
        moments = MOMENTS if step % 2 == 0 else MOMENTS[:4]  # of others only each second step
        where = dice.choice(moments)
        rank = 0 if where == "save" else dice.randrange(ranks)
        if rank == late:
            where = "forward"
        plant(tmp_path, **{f"r{rank}_s{step}_{where}": KILL})
        late = rank if where in ("update", "callback") else -1
    with run_script(tmp_path, words, ranks=ranks) as run:
        assert run.wait(timeout_s=1500) == 0, run.console
    assert not [*tmp_path.glob("harm_*")]
    if ranks == 2:
        plain = of_torchrun(words)
    else:  # a mean of three gradients is rounded in another order than DDP's own
        plain = tmp_path / "plain"
        plain.mkdir()
        with run_script(plain, words, ranks=ranks) as undisturbed:
            assert undisturbed.wait() == 0, undisturbed.console
    assert_as_torchrun(tmp_path, plain, ranks)
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    assert len(summary["faults"]) == 15, summary["faults"]
    assert sum(one["steps_lost"] for one in summary["faults"]) == 0
    kinds = [one.name.rpartition("_")[2] for one in tmp_path.glob("done_*")]
    print(ranks, Counter(kinds))


# --- in one process ---


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A run of one rank without a supervisor, which Trainer is to take for one that repairs."""
    with attached_alone(tmp_path, monkeypatch, ours) as run:
        yield run


class _Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = torch.arange(6) * (index + 1) % 20
        return {"input_ids": row, "labels": row}


def _collated(rows):
    """As collators with a tokenizer give it: no plain dict."""
    return transformers.BatchEncoding({key: torch.stack([r[key] for r in rows]) for key in rows[0]})


class _Events(transformers.TrainerCallback):
    def __init__(self):
        self.events = []

    def on_step_begin(self, args, state, control, **named):
        self.events.append(("begin", state.global_step))

    def on_pre_optimizer_step(self, args, state, control, **named):
        self.events.append(("update", state.global_step))

    def on_step_end(self, args, state, control, **named):
        self.events.append(("end", state.global_step))


def made(kind, events=None, train_dataset=None, **arguments):
    transformers.set_seed(3)
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=1,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    given = {
        "output_dir": "out",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        **arguments,
    }
    return kind(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(**given),
        train_dataset=train_dataset or _Rows(),
        eval_dataset=_Rows(),
        data_collator=_collated,
        callbacks=[events] if events else None,
    )


def test_without_a_supervisor_it_is_trainer_itself():
    assert ours.RUN is None
    assert ours.Trainer is transformers.Trainer
    assert ours.in_place(dict) is dict


class _Counting(transformers.Trainer):
    """Counts in attributes of its own; its body fails once."""

    calls = 0
    fails_at = None

    def compute_loss(self, *args, **named):
        self.seen = [*getattr(self, "seen", ()), self.state.global_step]
        if self.fails_at == self.state.global_step:
            raise ValueError("its own")
        return super().compute_loss(*args, **named)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3},
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 1.0},
            "metric_for_best_model": "eval_loss",
            "eval_strategy": "epoch",
            "eval_on_start": True,
        },
    ],
    ids=["accumulated", "workers", "plateau"],
)
def test_the_repeated_first_body_is_reported_and_counted_once(alone, options):
    """The weights, the log and the callbacks are those of Trainer itself."""
    events, plain_events = _Events(), _Events()
    plain = made(_Counting, plain_events, **options)
    plain.train()
    trainer = made(ours.in_place(_Counting), events, **options)
    trainer.train()
    assert events.events == plain_events.events
    assert trainer.seen == plain.seen
    assert_same_training(trainer, plain)
    assert trainer._in_place_progress._changed == {"seen", "_Events.events"}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_steps_that_overflow_in_fp16_are_those_of_trainer(alone, optim):
    """The loss scale, the weights and the log, with the rates of a schedule that leaves out such steps."""
    trainers = [
        made(kind, fp16=True, optim=optim, max_steps=12)
        for kind in (transformers.Trainer, ours.in_place(_Counting))
    ]
    scales = []
    for trainer in trainers:
        in_fp16(trainer.accelerator)
        trainer.train()
        scales.append(trainer.accelerator.scaler.state_dict())
    assert_same_training(trainers[1], trainers[0])
    assert scales[0] == scales[1]
    assert scales[0]["scale"] < 2.0**19
    assert alone.step_number == 12


def test_the_run_logs_the_loss_of_the_whole_step(alone, monkeypatch):
    """Not that of its first batch: what Trainer logs."""
    reported = []
    monkeypatch.setattr(alone._runtime, "report", reported.append)
    trainer = made(ours.in_place(_Counting), gradient_accumulation_steps=3)
    trainer.train()
    logged = [one.values["loss"] for one in reported if isinstance(one, Metrics)]
    expected = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert len(logged) == 6
    assert (
        alone._parts.workload.recipe["samples in a step"] == 6
    )  # a resume with others is not exact
    assert logged == pytest.approx(expected, rel=1e-4)


class _Rates(transformers.TrainerCallback):
    """Sets the rate of each step, by what it has counted itself, and an argument."""

    def __init__(self):
        self.steps = 0

    def on_step_begin(self, args, state, control, optimizer, **named):
        self.steps += 1
        args.max_grad_norm = 0.5 / self.steps
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 1.5**self.steps


def test_a_callback_sets_the_rate_of_a_repeated_body_too(alone):
    trainers = [
        made(kind, _Rates(), lr_scheduler_type="constant")
        for kind in (transformers.Trainer, ours.in_place(transformers.Trainer))
    ]
    for trainer in trainers:
        trainer.train()
    assert_same_training(trainers[1], trainers[0])
    assert alone._state.carried == []
    kept = trainers[1]._in_place_progress.state_dict()["own"]
    assert kept == {"_Rates.steps": 6, "args.max_grad_norm": 0.5 / 6}


class _Freezes(transformers.TrainerCallback):
    """Trains the embeddings from the second epoch on only."""

    def on_epoch_begin(self, args, state, control, model, **named):
        model.transformer.wte.requires_grad_(state.epoch >= 1)


def test_what_an_epoch_begins_with_holds_in_a_repeated_body_too(alone):
    """The first body of a launch is repeated, and ``on_epoch_begin`` is not called again."""
    trainers = [
        made(kind, _Freezes())
        for kind in (transformers.Trainer, ours.in_place(transformers.Trainer))
    ]
    for trainer in trainers:
        trainer.train()
    assert_same_training(trainers[1], trainers[0])


class _Tally:
    """An object of a program's."""

    def __init__(self):
        self.rows = []


class _Calls:
    """A collator that counts its calls, as one does that masks more and more."""

    calls = 0

    def __call__(self, rows):
        self.calls += 1
        return _collated(rows)


@pytest.mark.parametrize("counts", [True, False])
def test_what_an_epoch_leaves_in_a_collator_is_named(alone, counts):
    """Of the collators of transformers nothing is: a tokenizer is as it was after each call."""
    vocabulary = {"<pad>": 0, **{str(one): one for one in range(1, 20)}}
    tokens = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>")
    theirs = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = made(ours.in_place(transformers.Trainer), max_steps=12)
    trainer.data_collator = _Calls() if counts else theirs
    trainer.train()
    assert alone._state.carried == (["`collate_fn.data_collator`"] if counts else [])


class _Names(transformers.Trainer):
    """Has attributes and a method with names that a subclass of Trainer may well have."""

    _loss = 4.0

    def _draw(self, loss):
        self._loss = 0.9 * self._loss + 0.4
        self._progress = getattr(self, "_progress", 0) + 1
        return loss * self._loss

    def compute_loss(self, *args, **named):
        return self._draw(super().compute_loss(*args, **named))


def test_a_subclass_has_names_of_its_own(alone):
    """None of them is taken for one of ours."""
    trainers = [made(kind) for kind in (_Names, ours.in_place(_Names))]
    for trainer in trainers:
        trainer.train()
    assert_same_training(trainers[1], trainers[0])
    assert [one._progress for one in trainers] == [6, 6]
    assert trainers[1]._loss == trainers[0]._loss


class _Holds(transformers.Trainer):
    """Holds what no state has, some of which changes, and a number, which is kept."""

    def compute_loss(self, *args, **named):
        if not hasattr(self, "tally"):
            self.tally, self.kinds, self.teacher = _Tally(), {"a"}, torch.nn.Linear(2, 2)
        self.tally.rows.append(self.state.global_step)
        self.seen = getattr(self, "seen", 0) + 1
        return super().compute_loss(*args, **named)


class _Sees(transformers.TrainerCallback):
    def __init__(self):
        self.seen = set()

    def on_step_end(self, args, state, control, **named):
        self.seen.add(state.global_step)


class _Stops(transformers.EarlyStoppingCallback):
    """Counts what the state() that it inherits leaves out."""

    steps = 0

    def on_step_end(self, args, state, control, **named):
        self.steps += 1


class _Copies(transformers.TrainerCallback):
    """Averages the weights in a copy of the model, and has another one that stays as it is."""

    def on_train_begin(self, args, state, control, model, **named):
        self.average, self.teacher = copy.deepcopy(model), copy.deepcopy(model).eval()

    @torch.no_grad()
    def on_step_end(self, args, state, control, model, **named):
        for mean, one in zip(self.average.parameters(), model.parameters(), strict=True):
            mean.lerp_(one, 0.1)


@pytest.mark.filterwarnings("ignore")  # that a callback with a state() has none of ours
def test_what_changes_and_is_kept_nowhere_is_named(alone):
    """Of the program's own Trainer and callbacks; not what Trainer and its callbacks hold."""
    early = transformers.EarlyStoppingCallback(early_stopping_patience=9)
    stops = _Stops(early_stopping_patience=9)
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    trainer = made(ours.in_place(_Holds), _Sees(), max_steps=10, **options)
    trainer.add_callback(early)
    for one in (_Copies(), stops):
        trainer.add_callback(one)
    trainer.train()
    named = ["`_Copies.average`", "`_Holds.tally`", "`_Sees.seen`", "`_Stops.steps`"]
    assert sorted(alone._state.carried) == named


class _Stream(torch.utils.data.IterableDataset):
    """Five batches of two, without a length."""

    def __iter__(self):
        rows = _Rows()
        yield from (rows[index] for index in range(10))


def test_a_stream_begins_again_where_it_ends(alone):
    """As with Trainer itself; a partly filled step at its end is left out."""
    plain = made(transformers.Trainer, train_dataset=_Stream(), max_steps=7)
    plain.train()
    events = _Events()
    trainer = made(
        ours.in_place(transformers.Trainer), events, train_dataset=_Stream(), max_steps=7
    )
    trainer.train()
    losses = [[one.get("loss") for one in each.state.log_history] for each in (trainer, plain)]
    assert losses[0] == losses[1]
    assert [step for event, step in events.events if event == "end"] == [*range(1, 8)]
    with pytest.raises(BadInputError, match="data without a length"):
        made(ours.in_place(transformers.Trainer), train_dataset=_Stream()).train(
            resume_from_checkpoint="out"
        )


@pytest.mark.parametrize("resumed", ["out/checkpoint-3", True], ids=["path", "newest"])
def test_a_run_begins_with_a_checkpoint_of_trainer(alone, resumed):
    """Amid an epoch of four steps. Its weights, log and best metric are those of Trainer's own resume."""
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9, "eval_strategy": "steps"}
    options |= {"eval_steps": 3, "metric_for_best_model": "eval_loss"}
    early = transformers.EarlyStoppingCallback(early_stopping_patience=9)
    made(transformers.Trainer, early, **{**options, "max_steps": 3}).train()
    plain = made(transformers.Trainer, early, **options, load_best_model_at_end=True)
    plain.train(resume_from_checkpoint="out/checkpoint-3")
    for path in ("out/checkpoint-6", "out/checkpoint-9"):
        shutil.rmtree(path)
    events = _Events()
    trainer = made(ours.in_place(_Counting), events, **options, load_best_model_at_end=True)
    trainer.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=9))
    trained = trainer.train(resume_from_checkpoint=resumed)
    assert trained.global_step == 9
    assert [step for event, step in events.events if event == "begin"] == [*range(3, 9)]
    assert_same_training(trainer, plain)
    assert trainer.state.best_global_step == plain.state.best_global_step


def assert_same_training(trainer, plain):
    history = [
        [without_durations(one) for one in each.state.log_history] for each in (trainer, plain)
    ]
    texts = [json.dumps(one) for one in history]  # NaN, of an overflow, differs from itself
    assert json.loads(texts[0], parse_constant=str) == json.loads(texts[1], parse_constant=str)
    weights = plain.model.state_dict()
    assert all(torch.equal(one, weights[k]) for k, one in trainer.model.state_dict().items())


def test_without_a_supervisor_an_error_of_a_step_is_raised(alone):
    trainer = made(ours.in_place(_Counting))
    trainer.fails_at = 3
    with pytest.raises(ValueError, match="its own"):
        trainer.train()


def test_what_is_not_supported_is_refused_before_the_first_step(alone):
    trainer = made(ours.in_place(_Counting), torch_compile=True)
    with pytest.raises(BadInputError, match="torch_compile"):
        trainer.train()
    trainer = made(ours.in_place(_Counting))
    with pytest.raises(BadInputError, match=r"hyperparameter_search\(\)"):
        trainer.hyperparameter_search()
    with pytest.raises(BadInputError, match="there is no checkpoint in out"):
        trainer.train(resume_from_checkpoint=True)
    assert not hasattr(trainer, "seen")


def test_another_version_is_refused(alone, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(BadInputError, match=r"transformers>=5\.24,<6"):
        ours.in_place(transformers.Trainer)


def test_trainer_has_the_methods_that_are_overridden():
    """Of the installed version; what has moved is named."""
    assert ours._lacking(transformers.Trainer) == []
    named = {
        "_run_epoch": {
            *("epoch", "num_update_steps_per_epoch", "train_dataloader", "epochs_trained"),
            *("resume_from_checkpoint", "steps_trained_in_current_epoch"),
        },
        "_init_training_state": {"max_steps", "num_update_steps_per_epoch"},
        "_maybe_log_save_evaluate": {"tr_loss", "start_time"},
        "_finalize_training": {"trial", "num_train_samples", "start_time"},
        "_evaluate": {"trial", "ignore_keys_for_eval", "skip_scheduler"},
    }
    for method, expected in named.items():
        found = inspect.signature(getattr(transformers.Trainer, method)).parameters
        assert expected <= found.keys(), method


@pytest.mark.parametrize("kind", [transformers.Trainer, ours._InPlace])
def test_the_names_of_a_class_are_those_in_its_source(kind):
    """By which a subclass's own attributes are known; to have the source read by inspect takes a repair 0.4 s."""
    expected = re.findall(r"\bself\.(\w+)", inspect.getsource(kind))
    assert _names_of(kind) == frozenset(expected)


class _Loader:
    """Seven batches, whose order is an epoch's."""

    dataset = ()
    persistent_workers = False

    def __len__(self):
        return 7

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(10 * self.epoch, 10 * self.epoch + 7))


def _batches(first):
    return ours._StepBatches(_Loader(), 3, seed=0, first=lambda: first)


def test_the_last_step_of_an_epoch_has_the_batches_that_are_left():
    batches = _batches(first=0)
    batches.set_epoch(1)
    assert len(batches) == 3
    assert [*batches] == [[10, 11, 12], [13, 14, 15], [16]]


def test_a_pass_from_a_checkpoint_ends_amid_the_next_epoch():
    """At step 4 of epochs of three steps: the run's first pass begins at the second step of epoch 1."""
    batches = _batches(first=4)
    assert [*batches] == [[13, 14, 15], [16], [20, 21, 22]]
    batches.set_epoch(1)
    assert [*batches] == [[23, 24, 25], [26], [30, 31, 32]]


def _progress(rank):
    """Of a Trainer amid training."""
    state = transformers.TrainerState(global_step=4)
    trainer = Namespace(
        state=state,
        control=transformers.TrainerControl(),
        callback_handler=Namespace(
            callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=3)]
        ),
        model=torch.nn.Linear(1, 1),
        args=Namespace(max_grad_norm=1.0),
        current_flos=0.0,
        rank=rank,
        seen=0,
        _tr_loss=torch.tensor(0.0),
        _total_loss_scalar=0.0,
        _globalstep_last_logged=0,
        _initial_global_step=0,
    )
    return trainer, Progress(
        trainer, 2, rank, torch.device("cpu"), classes=(ours._THEIRS, ours._InPlace)
    )


def test_a_replaced_rank_gets_its_own_counts_and_what_steps_have_changed():
    """From another rank: not that one's number of its own, nor how long that one has evaluated."""
    source, kept = _progress(rank=0)
    source.seen, source._total_loss_scalar, source._globalstep_last_logged = 5, 1.5, 4
    source.state.log_history = [{"loss": 2.0}, {"eval_loss": 3.0, "eval_runtime": 0.1}]
    source.callback_handler.callbacks[0].early_stopping_patience_counter = 2
    kept.counted[:, 0] = torch.tensor([0.25, 0.75])
    kept.saved.append(2)
    kept.first = 3
    source.state.max_steps, source.control.should_training_stop = 4, True  # a run at its end
    kept.take_between()
    kept.look()
    replaced, progress = _progress(rank=1)
    replaced.state.max_steps = 9  # of a launch that makes it longer
    progress.load_state_dict(kept.state_dict())
    progress.put_between()
    progress.put_counted()
    assert (replaced.seen, replaced.rank) == (5, 1)
    assert (replaced.state.max_steps, replaced.control.should_training_stop) == (9, False)
    assert replaced._tr_loss == 0.75
    assert replaced.state.log_history == [{"loss": 2.0}, {"eval_loss": 3.0}]
    assert (replaced._total_loss_scalar, replaced._globalstep_last_logged) == (1.5, 4)
    assert replaced.callback_handler.callbacks[0].early_stopping_patience_counter == 2
    assert (progress.saved, progress.first) == ([2], 3)
