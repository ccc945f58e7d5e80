"""A setting is declared in one place: a copy of the package has one field more, and all else follows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

from ddp_runner.config import from_record, to_record
from ddp_runner.core.run_stages import StagePlace
from ddp_runner.core.settings import MemorySettings, OptimSettings, RunSettings, Settings
from ddp_runner.kernel.rules.errors import BadInputError

ROOT = Path(__file__).parents[1]
ABOVE = '    """Optimizer, schedule and precision."""\n'
FIELD = '''
    look_ahead: Annotated[
        Below1,
        REPORTED,
        PER_STAGE,
        DeviceDefault(gpu=0.25),
        Option(
            "--look-ahead",
            aliases=("--peek",),
            group=OptionGroup.HOW_LONG,
            metavar="SHARE",
            says="how far the momentum looks ahead",
        ),
        Alias("nesterov", on="0.5", off="0"),
    ] = 0.0
    """Share of the momentum that is looked ahead. 0: none."""
'''
KEY = "optim.look_ahead"
PROGRAM = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, "docs")
import generate
from ddp_runner.features.machines.launching import _meaning
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.usage import settings_help, train_help
from ddp_runner.config import Surroundings, difference, from_flat, recipe, resolve, stage_digest
from ddp_runner.kernel.rules.errors import BadInputError

def typed(*words, preset=None):
    return resolve(command_line=parse_train(words).assignments, preset=preset).settings

def steps(settings):
    return recipe(settings, Surroundings(
        total_steps=9, ranks=1, device="cpu", precision="fp32", backend="gloo", threads=1,
        torch="2", own_task_reads_model=False))

def between_machines(settings):
    device = SimpleNamespace(device="cpu", others=(), visible_index=0)
    nodes = SimpleNamespace(least=2, most=2)
    return _meaning(SimpleNamespace(
        settings=settings, resume_key={}, nodes=nodes, devices=(device,),
        opaque=None, loop=None), b"")

def refused(*words):
    try:
        typed(*words)
    except BadInputError as error:
        return str(error)

def digest(**own):
    stages = [{"name": "first", "max_steps": 2, **own}]
    Path("run.yaml").write_text(json.dumps({"task": "synthetic", "stages": stages}))
    return stage_digest(resolve(files=[Path("run.yaml")]).stages[0].settings)

usual, other = typed(), typed("--look-ahead", "0.5")
print(json.dumps({
    "values": [one.optim.look_ahead for one in (
        usual, other, typed("--peek=0.5"), typed("--nesterov"), typed("look_ahead=5e-1"),
        from_flat({"look_ahead": 0.5}), typed(preset="gpu"))],
    "refused": refused("--look-ahead", "2"),
    "help": train_help(),
    "settings help": " ".join(settings_help().split()),
    "pages": {name: page() for name, page in {
        "settings": generate.settings_page, "stages": generate.stages_page,
        "command line": generate.command_line_page, "coming from": generate.coming_from_page,
    }.items()},
    "resumed": difference(steps(usual), steps(other)),
    "between machines": difference(between_machines(usual), between_machines(other)),
    "stages": [digest() != digest(look_ahead=0.5), digest() == digest(look_ahead=0)],
}))
"""


# One test process has all of these tests, and makes it once.
pytestmark = pytest.mark.xdist_group("one setting")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a package says and does in which that field, and nothing else, was added."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ddp_runner", folder / "ddp_runner", ignore=ignored)
    (folder / "docs").mkdir()
    for name in ("generate.py", "stages.md"):
        shutil.copy(ROOT / "docs" / name, folder / "docs")
    file = folder / "ddp_runner" / "core" / "settings" / "recipe.py"
    before, above, after = file.read_text(encoding="utf-8").partition(ABOVE)
    assert above
    file.write_text(before + above + FIELD + after, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_field_can_be_given_wherever_settings_are(found):
    """By its option and the option's alias, another trainer's name, its own name, and Python; with its defaults."""
    assert found["values"] == [0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25]
    assert found["refused"] == "--look-ahead=2: must be a number, 0 or more and below 1"


def test_a_new_field_is_in_help_and_documentation(found):
    """With text, range, defaults and what a resume makes of it."""
    assert (
        "      --look-ahead SHARE    how far the momentum looks ahead [0.0; on GPUs"
        in found["help"]
    )
    assert (
        "look_ahead = 0.0; on GPUs 0.25 Share of the momentum that is looked ahead. 0: none. "
        "Legal: a number, 0 or more and below 1. Reported on resume."
    ) in found["settings help"]
    pages = found["pages"]
    assert (
        "| `look_ahead` | 0.0; on GPUs 0.25 | a number, 0 or more and below 1 |"
        in pages["settings"]
    )
    assert "`look_ahead`" in pages["stages"]
    assert "`--peek` is `--look-ahead`" in pages["command line"]
    assert "`nesterov` | [`optim.look_ahead`]" in pages["coming from"]


def test_a_new_field_is_compared_on_resume_and_between_machines(found):
    """As its note says: reported, so machines must agree on it."""
    assert found["resumed"] == [f"{KEY}: 0.0 -> 0.5"]
    assert found["between machines"] == [f"{KEY}: 0.0 -> 0.5"]


def test_a_stage_may_have_a_new_field(found):
    """Its steps follow from it."""
    assert found["stages"] == [True, True]


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        (RunSettings, "epochs", 0),
        (RunSettings, "seed", 2**63),
        (RunSettings, "device", "tpu"),
        (RunSettings, "debug", "perhaps"),
        (RunSettings, "gpus", (0, -1)),
        (OptimSettings, "learning_rate", float("nan")),
        (OptimSettings, "max_grad_norm", True),
        (Settings, "run", {"epochs": 1}),
        (Settings, "task", {"width": object()}),
    ],
)
def test_a_value_that_is_not_legal_is_refused_where_it_is_made(kind, name, wrong):
    """By a program as by a file: no settings with such a value exist."""
    with pytest.raises(ValueError, match=rf"^{kind.__name__}\.{name}: "):
        kind(**{name: wrong})


def test_texts_and_lists_become_the_values_of_their_settings():
    """The control; and a record in JSON gives the same settings, with their stage."""
    made = Settings(
        run=RunSettings(epochs="3", gpus="0,1", init_from="scratch"),
        memory=MemorySettings(activation_checkpointing="all"),
        task={"sizes": (1, 2)},
        stages=({"name": "a"},),
        stage=StagePlace(names=("a",), number=0, digests=("d",)),
    )
    assert (made.run.epochs, made.run.gpus, made.run.init_from) == (3, (0, 1), "")
    assert (made.memory.activation_checkpointing, made.task) == ("all", {"sizes": [1, 2]})
    assert from_record(json.loads(json.dumps(to_record(made)))) == made


class Rate(float):
    """As numpy's float64 is one."""


class Width(str, Enum):
    WIDE = "wide"


@pytest.mark.parametrize(
    ("kind", "name", "given", "value"),
    [
        (RunSettings, "max_time", "1h", 3600.0),
        (RunSettings, "max_time", "23h30m", 84_600.0),
        (RunSettings, "max_time", "3600", 3600.0),
        (RunSettings, "max_time", 90, 90.0),
        (RunSettings, "name", Width.WIDE, "wide"),
        (
            Settings,
            "task",
            {"width": Width.WIDE, "rate": Rate(0.5)},
            {"width": "wide", "rate": 0.5},
        ),
    ],
)
def test_what_is_written_in_another_way_becomes_a_plain_value(kind, name, given, value):
    """Times in units, numbers without a point, and what a program has in types of its own."""
    made = getattr(kind(**{name: given}), name)
    assert made == value
    parts = made.values() if isinstance(made, dict) else [made]
    assert {type(one) for one in parts} <= {float, str}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"run": {"epochs": 0}}, "run.epochs=0: must be a whole number, 1 or more"),
        ({"run": {"epoch": 1}}, "run.epoch: unknown setting"),
        ({"runs": {}}, "runs: unknown setting"),
        ({"run": 3}, "run: must be plain values"),
        ({"stage": {"number": 0}}, "stage: must be plain values"),
    ],
)
def test_a_record_that_is_none_is_refused_in_words(record, said):
    """As one that another version has written, or a damaged file."""
    with pytest.raises(BadInputError) as caught:
        from_record(record)
    assert str(caught.value) == said
