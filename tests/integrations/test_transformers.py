"""transformers' Trainer in place: as plain torchrun trains with it, also where ranks are lost. No hub, tiny models."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest
import torch

from ddp_runner.config import from_flat
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.training.local_runtime import local_runtime
from ddp_runner.training.own_loop.attached_run import AttachedRun
from tests.scenarios.conftest import PATIENT, filled_once
from tests.scenarios.harness import ROOT, Run, poll

transformers = pytest.importorskip("transformers", reason="not installed: the extra transformers")
pytest.importorskip("accelerate", reason="not installed: the extra transformers")

from ddp_runner.integrations import transformers as ours  # noqa: E402 - needs the library

SCRIPT = Path(__file__).with_name("trained.py")
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise RuntimeError('a cosmic ray')"
WAIT = "import time; open('it_waits', 'w').close(); time.sleep(3)"
NEEDS = "accumulate cosine best predict"
FINE_TUNING = "early best lora bf16 checkpointing own_loader predict"

# --- whole runs ---


def saved_by(folder):
    """What each rank has at its end: tensors, and the facts that Trainer gives."""
    found = []
    for rank in (0, 1):
        state = torch.load(folder / f"final_{rank}.pt", weights_only=False)
        facts = json.loads((folder / f"facts_{rank}.json").read_text())
        found.append((dict(_flat(state)), facts))
    return found


def _flat(value, path=""):
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(one, f"{path}.{key}")
    else:
        yield path, value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.fixture(scope="session")
def of_torchrun(tmp_path_factory, worker_id):
    """What plain torchrun and transformers' own Trainer save, by the words of the script; it lies in a folder."""

    def of(words):
        def make(folder):
            folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            subprocess.run(
                [*command, "--nproc-per-node", "2", SCRIPT, *words.split()],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                check=True,
                timeout=280,
            )

        return filled_once(tmp_path_factory, worker_id, make, ("torchrun", words))

    return of


def run_script(folder, words, **how):
    options = ("--preload", "transformers.trainer", "save_every_steps=9", *PATIENT)
    places = ("-l", folder / "logs", "-c", folder / "checkpoints")
    return Run(folder, *places, *options, SCRIPT, *words.split(), task=None, verb="run", **how)


def plant(folder, **places):
    for place, text in places.items():
        rank, step, where = place.split("_")
        (folder / f"harm_{rank[1:]}_{step[1:]}_{where}").write_text(text)


def assert_as_torchrun(folder, plain):
    for (state, facts), (expected, expected_facts) in zip(
        saved_by(folder), saved_by(plain), strict=True
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


@pytest.mark.whole_run
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


# --- in one process ---


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A run of one rank without a supervisor, which Trainer is to take for one that repairs."""
    monkeypatch.chdir(tmp_path)
    settings = from_flat(
        {
            "log_dir": str(tmp_path / "logs"),
            "checkpoint_dir": str(tmp_path / "kept"),
            "display": "none",
            "device": "cpu",
        }
    )
    run = AttachedRun(settings, local_runtime(settings, 0, 1), arguments="", on_end=lambda _: None)
    monkeypatch.setattr(ours, "RUN", run)
    yield run
    run._leave()


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


def made(kind, events=None, **arguments):
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
        train_dataset=_Rows(),
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
    history = [
        [ours._without_durations(one) for one in each.state.log_history]
        for each in (trainer, plain)
    ]
    assert history[0] == history[1]
    weights = plain.model.state_dict()
    assert all(torch.equal(one, weights[k]) for k, one in trainer.model.state_dict().items())
    assert trainer._progress._changed == {"seen"}


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
    with pytest.raises(BadInputError, match="resume_from_checkpoint"):
        trainer.train(resume_from_checkpoint="out/checkpoint-2")
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


def test_the_last_step_of_an_epoch_has_the_batches_that_are_left():
    batches = ours._StepBatches(_Loader(), 3)
    batches.set_epoch(1)
    assert len(batches) == 3
    assert [*batches] == [[10, 11, 12], [13, 14, 15], [16]]


def _progress(rank):
    """Of a Trainer amid training."""
    state = transformers.TrainerState(global_step=4)
    trainer = Namespace(
        state=state,
        control=transformers.TrainerControl(),
        callback_handler=Namespace(
            callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=3)]
        ),
        current_flos=0.0,
        rank=rank,
        seen=0,
        _tr_loss=torch.tensor(0.0),
        _total_loss_scalar=0.0,
        _globalstep_last_logged=0,
        _initial_global_step=0,
    )
    return trainer, ours._Progress(trainer, 2, rank, torch.device("cpu"))


def test_a_replaced_rank_gets_its_own_counts_and_what_steps_have_changed():
    """From another rank: not that one's number of its own, nor how long that one has evaluated."""
    source, kept = _progress(rank=0)
    source.seen, source._total_loss_scalar, source._globalstep_last_logged = 5, 1.5, 4
    source.state.log_history = [{"loss": 2.0}, {"eval_loss": 3.0, "eval_runtime": 0.1}]
    source.callback_handler.callbacks[0].early_stopping_patience_counter = 2
    kept.counted[:, 0] = torch.tensor([0.25, 0.75])
    kept.saved.append(2)
    kept.take_between()
    replaced, progress = _progress(rank=1)
    progress.load_state_dict(kept.state_dict())
    progress.put_between()
    progress.put_counted()
    assert (replaced.seen, replaced.rank) == (5, 1)
    assert replaced._tr_loss == 0.75
    assert replaced.state.log_history == [{"loss": 2.0}, {"eval_loss": 3.0}]
    assert (replaced._total_loss_scalar, replaced._globalstep_last_logged) == (1.5, 4)
    assert replaced.callback_handler.callbacks[0].early_stopping_patience_counter == 2
    assert progress.saved == [2]
