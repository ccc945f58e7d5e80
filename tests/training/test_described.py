"""What a checkpoint says of itself, and what its task describes."""

from __future__ import annotations

import math

import pytest

from ddp_runner import config
from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.manifest import Manifest, best_of
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.core.errors import BadInputError
from ddp_runner.features.trackers.follow import Position
from ddp_runner.training.described import about_file, described, tracker_ids
from ddp_runner.training.resume import load_start
from tests.checkpoint.states import facts_of, save

from .building import build_state
from .test_build import WORKLOAD, build

PACED = {"name": "PacedTask", "file": WORKLOAD}


class Says:
    def __init__(self, **values):
        self.values = values

    def build_model(self): ...

    def build_datasets(self): ...

    def loss(self, model, batch): ...

    def describe(self):
        return self.values


def test_a_state_says_its_settings_losses_and_tokens_as_json():
    """What is no number is left out; secrets are hidden; figures go to a replacement with the state."""
    state = build_state()
    state.figures = {"validation_loss": 1.5, "validation_accuracy": math.nan}
    state.tokens = 96.0
    settings = from_flat({"task.api_key": "abcdefgh", "task.width": 3})
    found = about_file(state, loss=2.25, settings=config.record_to_show(settings))
    assert found["settings"]["task"] == {"api_key": "***", "width": 3}
    assert found["settings"]["run"]["seed"] == 1234
    assert (found["tokens"], found["loss"]) == (96.0, 2.25)
    assert found["figures"] == {"validation_loss": 1.5}
    again = build_state()
    again.restore(state.capture())
    assert again.figures["validation_loss"] == 1.5
    bare = about_file(build_state(), loss=math.nan, settings={})
    assert bare == {"settings": {}}


def test_a_file_says_the_ids_of_trackers_that_have_begun(tmp_path):
    """As far as they are known by now; a tracker that only writes files has none."""
    settings = from_flat(
        {"log.trackers": ("csv", "wandb", "tensorboard"), "run.log_dir": str(tmp_path)}
    )
    assert tracker_ids(settings) == {}
    position = Position(tmp_path, "wandb")
    position.kept.update(id="r1-2", link="https://wandb.example/r1-2")
    position.save(link="")
    Position(tmp_path, "csv").save(link="metrics.csv")
    known = tracker_ids(settings)
    assert known == {"wandb": {"id": "r1-2", "link": "https://wandb.example/r1-2"}}
    found = about_file(build_state(), loss=math.nan, settings={}, trackers=known)
    assert found == {"settings": {}, "trackers": known}


def test_the_best_so_far_outlives_its_file(tmp_path):
    """Each manifest knows the lowest value up to its step; later ones of another branch do not count."""
    for step, value in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        saved = save(tmp_path, step, monitored=value, keep_last=1)
    assert best_of(saved.manifest) == [(1.0, 2)]
    for path in tmp_path.glob("step_00000002.*"):
        path.unlink()
    assert best_of(save(tmp_path, 5, monitored=2.5).manifest) == [(1.0, 2)]
    entry = Catalog(tmp_path).entries()[0]
    assert best_of(Manifest.from_json(entry.manifest.to_json())) == [(1.0, 2)]


def test_what_a_task_describes_is_part_of_its_resume_key():
    """Plain values, by name."""
    settings = from_flat({})
    found = described(Says(tokenizer="bpe", sizes=(1, 2)), settings)
    assert found == {"describe() tokenizer": "bpe", "describe() sizes": [1, 2]}
    assert described(object(), settings) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a object, which is no plain value"),
        (math.nan, "a float, which is no plain value"),
        ("x" * 30_000, "characters: give a hash of it"),
    ],
)
def test_what_is_described_must_be_plain(value, message):
    """One line, before anything starts."""
    with pytest.raises(BadInputError, match=message):
        described(Says(thing=value), from_flat({}))
    with pytest.raises(BadInputError, match="'api_key', the name of a secret"):
        described(Says(api_key="abcdefgh"), from_flat({}))


def test_a_resume_of_a_task_that_describes_itself_otherwise_is_refused(tmp_path):
    """With both values; a checkpoint of before it said anything is taken."""
    workload, state = build(**PACED)
    store = CheckpointStore(tmp_path, keep_last=2)
    state.committed_step = 0
    key = config.described_key("tokenizer.name")
    meaning = {**workload.resume_key, key: "bpe-8k"}
    store.save(state.capture(), facts_of(1, meaning=meaning))
    settings = from_flat({"resume": "auto"})
    workload, again = build(**PACED)
    workload.resume_key[key] = "bpe-16k"
    with pytest.raises(BadInputError) as caught:
        load_start(settings, workload, again, store)
    line = str(caught.value)
    assert "describe() tokenizer.name: bpe-8k -> bpe-16k" in line
    assert "the describe() tokenizer.name as it was" in line
    store.save(state.capture(), facts_of(1, meaning=dict(build(**PACED)[0].resume_key)))
    assert load_start(settings, workload, again, store) is not None
