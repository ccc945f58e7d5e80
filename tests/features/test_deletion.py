"""Deleting the folder of a feature deletes the feature, and nothing else: each beside any other one, and all at once."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys

import pytest

from ddp_runner import installed
from tests.scenarios.harness import ROOT

pytestmark = pytest.mark.whole_run

FEATURES = sorted(
    path.parent.name for path in (ROOT / "ddp_runner" / "features").glob("*/__init__.py")
)
# Each is deleted in three of six copies, and no two in the same three: of any two, one copy has either alone.
COPIES = dict(zip(FEATURES, itertools.combinations(range(6), 3), strict=False))
PARTS = [[feature for feature in COPIES if number in COPIES[feature]] for number in range(6)]
IN_A_RUN = sorted(  # a file, or a folder of that name
    {
        path.parent.name
        for name in ("parent", "child")
        for path in (ROOT / "ddp_runner" / "features").glob(f"*/{name}*")
        if path.stem == name
    }
)
CHECK_S, TRAIN_S = 200, 300
# What asks for a feature by a setting.
SETTINGS = {
    "after_save": "checkpoint.after_save=true {path}",
    "display": "log.display=live",
    "faults": "run.inject=kill:step=3",
    "page": "log.page=true",
    "preload": "data.preload=true",
    "proof": "recovery.drill_at=5",
    "spare": "recovery.warm_spare=process",
    "trackers": "log.trackers=csv",
}
# What asks for one by variables of the environment, if any, then words.
VARIABLES = {
    "launchers": ["RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "train", "--cpu"],
    "machines": ["NNODES=2", "train", "--cpu"],
    "ray": ["train", "--engine", "ray"],
}
# Imports each module that is left where all are deleted, shows the help of each command, and asks for what was deleted.
CHECK = """
import contextlib, importlib, io, json, os, pathlib, sys

import ddp_runner

root = pathlib.Path(ddp_runner.__file__).parent
assert str(root.parent) == sys.argv[1], root
# Of one feature the contracts know it: nothing outside imports it, and no feature imports another one.
for path in sorted(root.rglob("*.py")) if sys.argv[3] == "all" else ():
    parts = path.relative_to(root.parent).with_suffix("").parts
    if "on_path" in parts:
        continue
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # a package that an extra installs
        assert error.name.partition(".")[0] not in ("ddp_runner", "torch"), (name, error)

from ddp_runner.__main__ import main
from ddp_runner.cli.commands import commands

for name in commands():
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main([name, "--help"]) == 0, name
    assert len(shown.getvalue()) > 100, name
for words in json.loads(sys.argv[2]):
    variables = dict(one.split("=") for one in words if one.partition("=")[0].isupper() and "=" in one)
    os.environ.update(variables)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(words[len(variables):]) == 2, words
    for name in variables:
        del os.environ[name]
    assert said.getvalue().startswith("ddp_runner: error: "), words
    assert said.getvalue().count("\\n") == 1, said.getvalue()
"""


def asked_for(features):
    """Words that ask for what these features bring: a command, an option, a setting."""
    for words in installed.parts("words"):
        if words.__name__.split(".")[-2] not in features:
            continue
        yield from ([name] for name in getattr(words, "COMMANDS", {}))
        yield from ([one.option.long] for one in getattr(words, "INSTEAD", ()))
        for option in getattr(words, "OPTIONS", ()):
            yield [option.long, *([option.metavar] if option.metavar else [])]
        if several := getattr(words, "SEVERAL", None):
            yield from (["run", one.long, "x", "x.py"] for one in several.of_run)
            yield from (["doctor", one.long, "x"] for one in several.of_doctor)
    yield from ([SETTINGS[feature]] for feature in features if feature in SETTINGS)
    yield from (VARIABLES[feature] for feature in features if feature in VARIABLES)


@pytest.fixture
def without(tmp_path):
    """``without(features)``: runs an interpreter with a copy of the package from which they are deleted."""

    def made(features):
        copy = tmp_path / "copy"
        shutil.copytree(ROOT / "ddp_runner", copy / "ddp_runner")
        for feature in features:
            shutil.rmtree(copy / "ddp_runner" / "features" / feature)
        environment = {**os.environ, "PYTHONPATH": str(copy), "HOME": str(tmp_path)}

        def done(*words, limit_s):
            ended = subprocess.run(
                [sys.executable, *words],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
            assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]

        return done

    return made


@pytest.mark.parametrize("deleted", [*PARTS, FEATURES], ids="-".join)
def test_without_features_all_others_answer(tmp_path, without, deleted):
    """Modules and helps; who asks for one that is deleted reads one line, exit code 2."""
    assert len(COPIES) == len(FEATURES), "more copies are needed"
    asked = json.dumps([*asked_for(deleted)])
    which = "all" if deleted == FEATURES else "part"
    without(deleted)("-c", CHECK, str(tmp_path / "copy"), asked, which, limit_s=CHECK_S)


@pytest.mark.parametrize(
    "deleted",
    [
        pytest.param(IN_A_RUN[::2], marks=pytest.mark.slow),
        pytest.param(IN_A_RUN[1::2], marks=pytest.mark.slow),
        FEATURES,
    ],
    ids=["half", "other half", "all"],
)
def test_without_features_a_run_trains(tmp_path, without, deleted):
    """Without all of them; by hand each that takes part in a run is deleted beside half of the others, too."""
    few = ("--cpu", "-n", "1", "--max-steps", "3", "recovery.warm_spare=false")
    without(deleted)("-m", "ddp_runner", "train", "--test", *few, limit_s=TRAIN_S)
    assert (tmp_path / "logs").is_dir()


def test_without_several_machines_a_script_runs(tmp_path, without):
    """A feature that has a part for them needs them for that part alone."""
    (tmp_path / "script.py").write_text("print('trained')\n")
    without(["machines"])(
        "-m", "ddp_runner", "run", "--cpu", "-n", "1", "script.py", limit_s=TRAIN_S
    )
