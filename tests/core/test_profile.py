"""``--profile``: which steps, and one line with the cure for what cannot be."""

from __future__ import annotations

import pytest

from ddp_runner.config import check_relations, from_flat
from ddp_runner.core.profile import ProfileAsked, parse_profile, refuse_beyond_end
from ddp_runner.kernel.rules.errors import BadInputError


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("steps=10:15", ProfileAsked(first=10, last=15)),
        ("steps=7", ProfileAsked(first=7, last=7)),
        ("steps=1:2,memory", ProfileAsked(first=1, last=2, memory=True)),
        ("memory, steps=3", ProfileAsked(first=3, last=3, memory=True)),
        (None, None),
    ],
)
def test_the_steps_are_read_as_they_are_written(text, asked):
    """Both ends count; one number is one step; memory may stand on either side."""
    assert parse_profile(text) == asked


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps=15:10", "ends before it begins: write steps=10:15"),
        ("steps=0:3", "must begin with step 1"),
        ("steps=a:b", "must be steps=FIRST:LAST"),
        ("memory", "must be steps=FIRST:LAST"),
        ("steps=1:2,disk", "must be steps=FIRST:LAST"),
        ("steps=1:2,steps=4", "must be steps=FIRST:LAST"),
        ("", "must be steps=FIRST:LAST"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_cure(text, words):
    """Before any process starts."""
    with pytest.raises(BadInputError, match=words):
        parse_profile(text)


def test_steps_beyond_the_end_are_refused_where_it_is_known():
    """By the settings where they say the length, else by the data; a run that is as long is taken."""
    with pytest.raises(BadInputError, match="beyond the end of the run, which has 12 steps"):
        check_relations(from_flat({"max_steps": 12, "profile": "steps=10:13"}))
    check_relations(from_flat({"max_steps": 12, "profile": "steps=10:12"}))
    asked = ProfileAsked(first=10, last=13)
    with pytest.raises(BadInputError, match="12 steps"):
        refuse_beyond_end(asked, text="steps=10:13", total_steps=12)
    refuse_beyond_end(None, text=None, total_steps=1)


def test_a_replacement_joins_within_the_steps():
    """Whoever comes at a step between profiles the rest; before and after nobody does."""
    asked = ProfileAsked(first=3, last=5)
    assert [step for step in range(8) if asked.begins_before(step)] == [2, 3, 4]
