"""Files of settings that nobody names by path, and settings that a task does not read."""

from __future__ import annotations

import pytest

from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import files_not_read, plan_launch
from ddp_runner.config import home_files, resolve, to_yaml, unread_warning
from ddp_runner.kernel.rules.errors import BadInputError


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A working directory with presets, and a home of its own."""
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".config").mkdir(parents=True)
    (work / "presets").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    return home / ".config" / "ddp_runner.yaml", work / "presets"


def planned(*words):
    return plan_launch(parse_train(["--cpu", "-n", "1", *words]), words=words)


def test_a_file_at_home_lies_under_presets_and_files(places):
    """Default < home < preset < file < environment and command line; a line says that it is there."""
    at_home, presets = places
    at_home.write_text("data: {batch_size: 3, prefetch_factor: 3, num_workers: 3}\n")
    (presets / "small.yaml").write_text("data: {batch_size: 4, prefetch_factor: 4}\n")
    (presets.parent / "run.yaml").write_text("batch_size: 5\n")
    plan = planned("--config", "run.yaml", "--preset", "small", "pin_memory=false")
    data = plan.settings.data
    assert (data.num_workers, data.prefetch_factor, data.batch_size) == (3, 4, 5)
    assert plan.origins["data.num_workers"] == "file"
    assert f"{at_home} is included in these settings" in plan.notes
    at_home.unlink()
    plan = planned("--preset=small")
    assert (plan.settings.data.num_workers, plan.settings.data.batch_size) == (0, 4)
    assert not any("is included in" in note for note in plan.notes)


def test_what_is_wrong_at_home_is_named_with_its_file(places):
    """It was written long ago, and not for this run."""
    at_home, _ = places
    at_home.write_text("batch_size: many\n")
    with pytest.raises(BadInputError, match=r"home/.config/ddp_runner.yaml: batch_size=many: must"):
        planned()


def test_without_a_home_there_is_no_file():
    """Nor where the variable is empty, as a service's may be."""
    assert home_files({}) == home_files({"HOME": ""}) == home_files({"HOME": "/nonexistent"}) == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smal", "--preset=smal: no such file presets/smal.yaml; did you mean small?"),
        ("zzz", "--preset=zzz: no such file presets/zzz.yaml; there are large, small"),
        ("../run", "--preset=../run: no such file presets/../run.yaml; there are large, small"),
        ("", "--preset='': is empty; give a value, or leave it out"),
    ],
)
def test_a_preset_that_is_not_there_is_answered_with_those_that_are(places, name, words):
    """It is a name and no path: a preset cannot be anywhere else."""
    _, presets = places
    for known in ("small", "large"):
        (presets / f"{known}.yaml").write_text("epochs: 1\n")
    (presets.parent / "run.yaml").write_text("epochs: 1\n")
    with pytest.raises(BadInputError) as caught:
        parse_train(["--preset", name])
    assert str(caught.value) == words


def test_without_presets_the_place_is_named(places):
    """A person then knows where to put one."""
    with pytest.raises(BadInputError) as caught:
        parse_train(["--preset", "small"])
    assert str(caught.value) == "--preset=small: no such file presets/small.yaml"


def warned(*words, is_given_all=False, files=()):
    resolved = resolve(files=files, command_line=parse_train(words).assignments, preset="cpu")
    return unread_warning(resolved.settings, resolved.origin, is_given_all=is_given_all)


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (
            ["vocab_size=64"],
            "the task bytes does not read model.vocab_size: it has no effect; task=synthetic does",
        ),
        (["hidden_size=64", "--data", "x", "validation_fraction=0.1"], ""),
        (
            ["--task", "synthetic", "--data", "x", "vocab_size=9"],
            "the task synthetic does not read data.path: it has no effect",
        ),
        (
            ["--task", "my.py", "num_layers=2", "dropout=0.1", "lr=0.1"],
            "the task my.py does not read model.num_layers, model.dropout: they have no effect",
        ),
        (["--task", "my.py"], ""),
    ],
)
def test_a_setting_that_the_task_does_not_read_is_named(words, warning):
    """Where somebody has chosen it: defaults and what a preset lays over them are nobody's choice."""
    assert "; ".join(warned(*words)) == warning


def test_a_file_of_settings_that_is_not_read_is_named(tmp_path, monkeypatch):
    """A config.yaml of the working folder; not where files were given."""
    monkeypatch.chdir(tmp_path)
    assert list(files_not_read([])) == []
    (tmp_path / "config.yaml").write_text("epochs: 2\n")
    assert list(files_not_read([])) == [
        "config.yaml is here, and is not read: --config config.yaml reads it"
    ]
    assert list(files_not_read([tmp_path / "config.yaml"])) == []


def test_a_task_that_is_given_all_settings_may_read_any():
    """Nobody knows which of them it reads."""
    assert warned("--task", "my.py", "num_layers=2", is_given_all=True) == ()
    assert warned("vocab_size=64", is_given_all=True) != ()


def test_a_file_of_all_settings_is_no_choice_of_each(tmp_path):
    """A config.yaml that a run has written has every one; what is not usual in a file was chosen."""
    whole = tmp_path / "config.yaml"
    whole.write_text(to_yaml(resolve(preset="cpu").settings))
    assert warned("--task", "my.py", files=[whole]) == ()
    whole.write_text("model: {hidden_size: 96}\n")
    assert "model.hidden_size" in warned("--task", "my.py", files=[whole])[0]
