"""Names that are not ours: accepted where they mean the same, answered, or held against whole words."""

from __future__ import annotations

import pytest

from ddp_runner.config import resolve
from ddp_runner.config.fields import ForeignNameError, find_key, known_fields, sections
from ddp_runner.config.foreign import ALIASES, ANSWERS
from ddp_runner.config.suggest import nearest
from ddp_runner.core.faults import BadInputError

KNOWN = list(known_fields())
LAST_NAMES = {key.rpartition(".")[2] for key in KNOWN}


def test_every_name_of_others_leads_to_a_setting_or_to_an_answer():
    """To one that exists; never to both, and no name of our own is taken away."""
    assert set(ALIASES.values()) <= set(KNOWN)
    assert not set(ALIASES) & LAST_NAMES
    assert not set(ANSWERS) & (LAST_NAMES | set(ALIASES))
    for name in ALIASES:
        assert find_key(name, name, KNOWN) == ALIASES[name]
    for name in ANSWERS:
        with pytest.raises(ForeignNameError):
            find_key(name, name, KNOWN)


def test_answers_are_one_short_line_and_name_what_exists():
    """What they say to write is a setting or an option."""
    for answer in ANSWERS.values():
        assert "\n" not in answer
        assert len(answer) < 100
        named = [word.partition("=")[0] for word in answer.split() if "=" in word]
        for name in named:
            assert name in LAST_NAMES, answer


@pytest.mark.parametrize("name", ["fp16", "strategy", "optim"])
def test_a_file_of_settings_is_answered_as_well(name, tmp_path):
    """With the file and the name as it stands there."""
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: something\n")
    with pytest.raises(BadInputError) as caught:
        resolve(files=[file])
    expected = "is a section" if name in sections() else ANSWERS[name]
    assert str(caught.value).startswith(f"{file}: {name}")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *(("batchsize", "data.batch_size"), ("batch_sze", "data.batch_size")),
        *(("data.batch", "data.batch_size"), ("epoch", "run.epochs"), ("epohcs", "run.epochs")),
        *(("num_worker", "data.num_workers"), ("checkpoint_dirs", "run.checkpoint_dir")),
        *(("warmup", "optim.warmup_steps"), ("learning", "optim.learning_rate")),
        *(
            ("weight-decay-rate", "optim.weight_decay"),
            ("find_unused", "ddp.find_unused_parameters"),
        ),
        *(("num_things", ""), ("max_things", ""), ("processes", ""), ("qqqq", ""), ("", "")),
        *(("num", ""), ("data_format", ""), ("task.", ""), ("the", ""), ("--", "")),
    ],
)
def test_a_suggestion_has_the_letters_or_the_words_of_what_was_written(written, meant):
    """A common `num_` or `max_`, or some letters in the same order, is no likeness."""
    assert nearest(written, KNOWN) == meant
