"""What trackers need is found out before anything starts; keys come from a file that wins over nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_runner.cli import extras
from ddp_runner.cli.extras import env_keys, parse_env, refuse_missing, take_keys
from ddp_runner.config import resolve
from ddp_runner.config.sources import from_environment
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import GIVEN_BY_FILE, environment_secrets

ROOT = Path(__file__).resolve().parents[2]


def settings(names):
    return resolve(command_line=[("log.trackers", names)]).settings


def test_names_are_a_list_without_repetition():
    """In any case, with spaces; none is none."""
    assert settings("csv, TensorBoard,csv").log.trackers == ("csv", "tensorboard")
    assert settings("").log.trackers == ()


def test_an_unknown_name_is_answered_with_those_there_are():
    """In one line."""
    with pytest.raises(BadInputError) as caught:
        settings("csv,wandbb")
    assert str(caught.value) == (
        "log.trackers=csv,wandbb: must be names separated by commas, of csv, tensorboard, wandb, mlflow"
    )


def test_the_command_that_installs_is_one_that_there_is(monkeypatch):
    """Only the script has ``environment``, and so it is named to those who use ``python -m``."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    script = ROOT / "launch_training.sh"
    for typed, named in (("python -m ddp_runner", script), ("../x/launch_training.sh",) * 2):
        monkeypatch.setattr(extras.start, "COMMAND", typed)
        assert f"`{named} environment --extra page`" in extras.page_missing()


def test_what_is_not_installed_is_refused_with_the_command(monkeypatch):
    """CSV needs nothing."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    refuse_missing(settings("csv"), {})
    for name in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(BadInputError, match=f"{name} is not installed .* --extra {name}"):
            refuse_missing(settings(name), {})


def test_mlflow_needs_a_database_unless_it_has_a_server(monkeypatch):
    """Its small package has none."""
    monkeypatch.setattr(extras, "find_spec", lambda name: name == "mlflow" or None)
    with pytest.raises(BadInputError, match=r"'sqlalchemy>=2,<3' 'alembic>=1.10,<2'"):
        refuse_missing(settings("mlflow"), {})
    refuse_missing(settings("mlflow"), {"MLFLOW_TRACKING_URI": "https://mlflow.example"})


def test_wandb_needs_a_key_or_to_be_offline(monkeypatch, tmp_path):
    """Also one that its own login has left in a file."""
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    nowhere = {"NETRC": str(tmp_path / "netrc")}
    with pytest.raises(BadInputError, match="WANDB_API_KEY"):
        refuse_missing(settings("wandb"), nowhere)
    for found in ({"WANDB_API_KEY": "k"}, {"WANDB_MODE": "offline"}):
        refuse_missing(settings("wandb"), {**nowhere, **found})
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    (tmp_path / "netrc").chmod(0o600)
    refuse_missing(settings("wandb"), nowhere)


def test_lines_of_an_env_file_are_read_as_a_shell_does():
    """Quotes, comments, export; what is no assignment is left out."""
    text = "# a comment\nexport A_KEY='one # two'\nB_TOKEN=three # four\n\nC=\nnonsense\n1X=2\n"
    assert parse_env(text) == {"A_KEY": "one # two", "B_TOKEN": "three", "C": ""}


def test_an_env_file_gives_keys_alone_and_wins_over_nothing(tmp_path, monkeypatch):
    """It lies beside the configuration; without one, in the working folder."""
    written = "WANDB_API_KEY=a\nHF_TOKEN=b\nWANDB_MODE=offline\nMLFLOW_TRACKING_URI=u\nLD_PRELOAD=x\nCUDA_VISIBLE_DEVICES=\n"
    (tmp_path / ".env").write_text(written)
    config = tmp_path / "config.yaml"
    expected = {"WANDB_API_KEY": "a", "HF_TOKEN": "b", "WANDB_MODE": "offline"}
    expected["MLFLOW_TRACKING_URI"] = "u"
    assert env_keys([config], {}) == expected
    assert env_keys([config], {"HF_TOKEN": ""}) == {
        k: v for k, v in expected.items() if k != "HF_TOKEN"
    }
    assert env_keys([tmp_path / "other" / "config.yaml"], {}) == {}
    monkeypatch.chdir(tmp_path)
    assert env_keys([], {}) == expected
    (tmp_path / ".env").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInputError, match="is not text"):
        env_keys([config], {})


def test_no_keys_are_taken_from_beside_a_preset_or_launchs_file(tmp_path, monkeypatch):
    """launch() writes its configuration where anybody may put a .env; what is taken is named."""
    project, others = tmp_path / "project", tmp_path / "tmp"
    for folder in (project / "presets", others):
        folder.mkdir(parents=True)
        (folder / ".env").write_text("HF_TOKEN=of-somebody-else\nMY_PASSWORD=theirs\n")
    (project / ".env").write_text("HF_TOKEN=mine\nWANDB_API_KEY=written\n")
    monkeypatch.chdir(project)
    environment = {"WANDB_API_KEY": "set", "DDP_RUNNER_LAUNCHED": str(others / "ddp_runner_x.yaml")}
    monkeypatch.setattr(extras.os, "environ", environment)
    files = (extras.Path("presets/small.yaml"), others / "ddp_runner_x.yaml")
    assert take_keys(files) == (".env: HF_TOKEN",)
    assert (environment["HF_TOKEN"], environment["WANDB_API_KEY"]) == ("mine", "set")
    assert "MY_PASSWORD" not in environment
    assert take_keys((others / "own.yaml",)) == (".env: MY_PASSWORD",)


def test_values_of_variables_that_are_secrets_by_name():
    """Short words, which stand in other texts too, are none."""
    variables = {
        "WANDB_API_KEY": "0123456789abcdef",
        "MY_PASSWORD": "correct horse",
        "USE_TOKEN": "true",
        "PATH": "/usr/bin:/usr/local/bin",
    }
    assert environment_secrets(variables) == ("0123456789abcdef", "correct horse")


def test_short_secrets_are_hidden_where_a_file_has_given_them(tmp_path, monkeypatch):
    """A person has written them down for this run: no word of another program, and none that stands everywhere."""
    (tmp_path / ".env").write_text(
        "DB_PASSWORD=hunt3r\nPIN_TOKEN=123\nMAX_TOKENS=2048\nA_KEY=none\nWANDB_PROJECT=mine-alone\n"
    )
    environment = {"USE_TOKEN": "true", GIVEN_BY_FILE: "OLD_KEY", "OLD_KEY": "1a345"}
    monkeypatch.setattr(extras.os, "environ", environment)
    take_keys((tmp_path / "run.yaml",))
    assert (
        environment[GIVEN_BY_FILE] == "OLD_KEY,DB_PASSWORD,PIN_TOKEN,MAX_TOKENS,A_KEY,WANDB_PROJECT"
    )
    assert environment_secrets(environment) == ("1a345", "hunt3r")
    assert list(from_environment(environment)) == []  # it is no setting
