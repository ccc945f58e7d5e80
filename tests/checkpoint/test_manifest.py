"""The manifest's JSON form and the file names."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from ddp_runner.checkpoint.manifest import Manifest, checkpoint_name, manifest_name, step_of

from .states import facts_of

MANIFEST = Manifest(
    step=100,
    epoch=3,
    samples=3200,
    run_id="r",
    file="step_00000100.pt",
    size_bytes=12,
    sha256="0f" * 32,
    monitored=1.5,
    meaning={"seed": 7, "model": {"layers": [1, 2]}},
    settings_digest="abc",
    versions={"torch": "2.13"},
    created_utc="2026-01-01T00:00:00Z",
    reason="epoch",
    recipe={"ranks": 2},
)


@pytest.mark.parametrize("monitored", [1.5, 2, None])
def test_json_round_trip(monitored):
    """A manifest comes back from its JSON text as it was."""
    manifest = replace(MANIFEST, monitored=monitored)
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_facts_and_file_make_the_manifest_again():
    """The facts that travel inside a file, with its name, size and digest, are the whole manifest."""
    assert "sha256" not in MANIFEST.facts()
    again = Manifest.from_facts(
        MANIFEST.facts(), file=MANIFEST.file, size_bytes=12, sha256=MANIFEST.sha256
    )
    assert again == MANIFEST


def test_a_field_that_came_later_may_be_missing():
    """A checkpoint of an older version stays loadable."""
    values = json.loads(MANIFEST.to_json())
    del values["recipe"], values["facts_sha256"]
    assert Manifest.from_json(json.dumps(values)) == replace(MANIFEST, recipe={})


def test_a_manifest_with_numbers_as_keys_is_whole_when_it_is_read():
    """JSON has them as texts, which sort otherwise: 10 before 2."""
    with_numbers = replace(MANIFEST, data={"shares": {2: [1], 10: [2]}})
    assert Manifest.from_json(with_numbers.to_json()).data == {"shares": {"2": [1], "10": [2]}}


def test_fields_of_a_newer_writer_are_dropped():
    """An unknown field is no error as long as the format number is known; nor is one that older files have."""
    values = json.loads(MANIFEST.to_json()) | {"mood": "good", "pace": {"write_s": 1.5}}
    del values["facts_sha256"]
    assert Manifest.from_json(json.dumps(values)) == MANIFEST


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('"seed": 7', '"seed": 5'),
        ('"ranks": 2', '"ranks": 3'),
        ('"run_id": "r"', '"run_id": "s"'),
        ('"recipe"', '"recype"'),
    ],
)
def test_a_flipped_bit_in_a_field_is_damage(written, read):
    """Of a right type, and in a name: else a resume would be refused, or be of another run."""
    text = MANIFEST.to_json()
    assert text.count(written) == 1
    with pytest.raises(ValueError, match="its fields do not match its facts_sha256"):
        Manifest.from_json(text.replace(written, read))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "100"}, "step is '100', not int"),
        ({"step": True}, "step is True, not int"),
        ({"samples": -1}, "samples is -1, below 0"),
        ({"samples": 10**400}, "samples is a number of 1329 bits"),
        ({"monitored": 10**400}, "monitored is a number of 1329 bits"),
        ({"monitored": "low"}, "monitored is 'low', not int or float or NoneType"),
        ({"meaning": []}, "meaning is"),
        ({"format": 4}, "format 4; this version reads format 1 to 3"),
        ({"hashed": "md5"}, "hashed 'md5'; this version knows sha256, sha256-1MiB, sum64-1MiB"),
        ({"sha256": "zz"}, "sha256 is not 64 hexadecimal digits"),
        ({"file": "step_00000101.pt"}, "is not the file of step 100"),
        ({"file": "../step_00000100.pt"}, "is not the file of step 100"),
    ],
)
def test_garbage_is_refused_with_the_field_named(change, message):
    """Each field of a wrong type or value is a ValueError that names it."""
    text = json.dumps({**json.loads(MANIFEST.to_json()), **change})
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object but list"),
        ("{}", "lacks "),
    ],
)
def test_text_that_is_no_manifest_is_refused(text, message):
    """Torn or foreign text is a ValueError."""
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(text)


def test_a_value_without_json_form_is_refused_when_written():
    """NaN and objects never reach a manifest file."""
    with pytest.raises(ValueError):
        replace(MANIFEST, monitored=float("nan")).to_json()
    with pytest.raises(TypeError):
        replace(MANIFEST, meaning={"x": object()}).to_json()


def test_names_hold_the_step_and_nothing_else_does():
    """Only our own file names have a step, whatever its number of digits."""
    for step in (0, 7, 99_999_999, 100_000_000):
        assert step_of(checkpoint_name(step)) == step_of(manifest_name(step)) == step
    for name in ("step_7.pt", "step_00000007.pt.bad", ".step_00000007.pt.tmp-1", "last", "x.pt"):
        assert step_of(name) is None


def test_a_manifest_is_its_facts_and_those_of_its_file():
    """The facts are known first, do not change any more, and come back out of a manifest's JSON."""
    facts = facts_of(7, monitored=0.5, changes=("a change",))
    with pytest.raises(FrozenInstanceError):
        facts.step = 8
    made = Manifest.of(facts, size_bytes=3, sha256="0f" * 32)
    assert (made.file, made.size_bytes, made.sha256) == ("step_00000007.pt", 3, "0f" * 32)
    assert Manifest.of(Manifest.from_json(made.to_json()), size_bytes=3, sha256=made.sha256) == made
