"""Lists of stages: what each has of its own, and what is refused, in one line with the cure."""

from __future__ import annotations

import pytest
import yaml

from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.config import from_flat, from_record, resolve, stage_digest, to_record, to_yaml
from ddp_runner.config.fields import known_fields
from ddp_runner.kernel.rules.errors import BadInputError

PRE = {"name": "pre", "epochs": 2}
TUNE = {"name": "tune", "max_steps": 50, "optim": {"learning_rate": 0.002}, "task.mode": "b"}


def file_of(tmp_path, *stages, **common):
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump({**common, "stages": list(stages)}), encoding="utf-8")
    return path


def resolved(tmp_path, *stages, command_line=(), **common):
    return resolve(files=[file_of(tmp_path, *stages, **common)], command_line=command_line)


def refusal(tmp_path, *stages, **common):
    with pytest.raises(BadInputError) as caught:
        resolved(tmp_path, *stages, **common)
    assert str(caught.value).isprintable()
    return str(caught.value).partition("stages.yaml: ")[2]


def test_a_stage_lies_above_the_file_and_below_the_command_line(tmp_path):
    """Its end is its own; the name and the folders are the run's."""
    common = {"learning_rate": 0.01, "max_steps": 999, "task": {"mode": "a", "kept": 1}}
    found = resolved(tmp_path, PRE, TUNE, command_line=[("weight_decay", "0.5")], **common)
    pre, tune = (one.settings for one in found.stages)
    assert (pre.run.max_steps, pre.run.epochs, tune.run.max_steps) == (0, 2, 50)
    assert (pre.optim.learning_rate, tune.optim.learning_rate) == (0.01, 0.002)
    assert {pre.optim.weight_decay, tune.optim.weight_decay} == {0.5}
    assert (pre.task, tune.task) == ({"mode": "a", "kept": 1}, {"mode": "b", "kept": 1})
    assert pre.stage.name == "pre"
    assert (tune.stage.number, tune.stage.begins_with, tune.run.init_from) == (1, "previous", "")
    other = resolved(tmp_path, {**PRE, "run.task": "synthetic"}, TUNE)
    assert {one.settings.run.log_dir for one in other.stages} == {other.settings.run.log_dir}
    typed = resolved(tmp_path, PRE, TUNE, command_line=[("max_steps", "7")])
    assert [one.settings.run.max_steps for one in typed.stages] == [7, 7]


@pytest.mark.parametrize(
    ("word", "begins_with", "init_from"),
    [("best:ema", "best:ema", ""), ("scratch", "", ""), ("a/b.pt:ema", "", "a/b.pt:ema")],
)
def test_what_a_later_stage_begins_with(tmp_path, word, begins_with, init_from):
    """Never what the run began with."""
    found = resolved(tmp_path, PRE, {**TUNE, "init_from": word}, init_from="first.pt")
    first, second = (one.settings for one in found.stages)
    assert (first.run.init_from, first.stage.begins_with) == ("first.pt", "")
    assert (second.run.init_from, second.stage.begins_with) == (init_from, begins_with)


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        (
            ({"name": "pre"},),
            "stages: stage pre: needs an end: give it max_steps or epochs above 0",
        ),
        (({"name": "pre", "max_steps": 0},), "stages: stage pre: needs an end"),
        ((PRE, {"name": "tune", "run": {"max_steps": "0"}}), "stages: stage tune: needs an end"),
        ((), "stages: has no stages: list some, or leave the line out"),
        ((PRE, PRE), "stages=pre: two stages have this name: give each its own"),
        (({"epochs": 1},), "stages: stage 1: must have a name"),
        (({**PRE, "name": "a b"},), "stages: stage 1=a b: must have a name"),
        ((7,), "stages: stage 1=7: must have lines such as 'name: first'"),
        (({**PRE, "gpus": "0,1"},), "stages: stage pre: gpus: run.gpus belongs to the run"),
        (
            ({**PRE, "ddp": {"port": 3}},),
            "stages: stage pre: ddp.port: ddp.port belongs to the run",
        ),
        (({**PRE, "keep_last": 3},), "stages: stage pre: keep_last: checkpoint.keep_last belongs"),
        (({**PRE, "lr_": 1},), "stages: stage pre: lr_: unknown setting"),
        (({**PRE, "batch_size": 0},), "stages: stage pre: batch_size=0: must be a whole number"),
        (
            ({**PRE, "init_from": "best"},),
            "stages: stage pre: init_from=best: needs an earlier stage",
        ),
        (
            (PRE, {**TUNE, "init_from": 3}),
            "stages: stage tune: init_from=3: must be previous, best",
        ),
        (
            (PRE, {**TUNE, "init_from": "previus:ema"}),
            "stages: stage tune: init_from=previus:ema: did you mean previous?",
        ),
        (({**PRE, "deterministic": True},), "stages: stage pre: deterministic: run.deterministic"),
    ],
)
def test_a_wrong_list_is_one_line(tmp_path, stages, line):
    """Which stage, what is wrong, and what would be right."""
    assert refusal(tmp_path, *stages).startswith(line)


def test_a_list_is_for_files_and_python(tmp_path):
    """On the command line it is no list."""
    with pytest.raises(BadInputError, match="must be a list in a file"):
        resolve(command_line=[("stages", "pre,tune")])
    settings = from_flat({"stages": [PRE, TUNE], "batch_size": 3})
    assert settings.stages == (PRE, TUNE)
    with pytest.raises(BadInputError, match="stage pre: needs an end"):
        from_flat({"stages": [{"name": "pre"}]})


def test_a_list_that_is_not_there_is_no_run_without_stages(tmp_path):
    """All of its lines are comments, say."""
    path = tmp_path / "stages.yaml"
    path.write_text("batch_size: 3\nstages:\n#  - name: pre\n", encoding="utf-8")
    with pytest.raises(BadInputError, match="stages: has no stages"):
        resolve(files=[path])


def test_an_end_by_epochs_may_stand_beside_no_steps(tmp_path):
    """Control: a zero is only wrong where nothing else ends the stage."""
    (only,) = resolved(tmp_path, {"name": "pre", "max_steps": 0, "epochs": 3}).stages
    assert (only.settings.run.max_steps, only.settings.run.epochs) == (0, 3)


def test_the_file_of_a_run_gives_the_same_stages_again(tmp_path):
    """config.yaml holds what they have in common, and the list; a rank gets its stage by the record."""
    found = resolved(tmp_path, PRE, TUNE, learning_rate=0.01)
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(found.settings), encoding="utf-8")
    second = resolve(files=[again])
    for one, other in zip(found.stages, second.stages, strict=True):
        assert one.settings == other.settings
        assert from_record(to_record(one.settings)) == one.settings
    assert "stage" not in yaml.safe_load(to_yaml(found.stages[1].settings))


def test_without_stages_records_are_as_before(tmp_path):
    """No key of them in file, record and digest."""
    settings = from_flat({"task": "synthetic"})
    assert not {"stages", "stage"} & set(to_record(settings))
    assert not {"stages", "stage"} & set(yaml.safe_load(to_yaml(settings)))


def test_a_digest_is_of_what_steps_follow_from(tmp_path):
    """Of rates, ends, data and begin; how often is logged or who loads does not matter."""

    def digests(*stages):
        return [stage_digest(one.settings) for one in resolved(tmp_path, *stages).stages]

    first, second = digests(PRE, TUNE)
    assert digests(PRE, {**TUNE, "log_interval": 3, "num_workers": 1}) == [first, second]
    for other in ({"max_steps": 51}, {"seed": 1}, {"init_from": "best"}, {"task.mode": "c"}):
        assert digests(PRE, {**TUNE, **other})[1] != second


def test_every_setting_of_a_stage_is_one(tmp_path):
    """And what the run shares between its stages is none of theirs."""
    of_a_stage = {key for key, spec in known_fields().items() if spec.per_stage}
    assert {"optim.learning_rate", "run.task", "data.path"} <= of_a_stage
    assert "recovery" not in {key.partition(".")[0] for key in of_a_stage}
    assert not {"run.log_dir", "run.nproc_per_node", "ddp.port", "data.preload"} & of_a_stage


def launched(tmp_path, *words, stages=(PRE, TUNE), **common):
    common = {"task": "synthetic", **common}
    path = file_of(tmp_path, *stages, **common)
    if not stages:
        path.write_text(yaml.safe_dump(common), encoding="utf-8")
    folders = ["-l", str(tmp_path / "l"), "-c", str(tmp_path / "c")]
    words = ["--cpu", "-n", "2", "--config", str(path), *folders, *words]
    return plan_launch(parse_train(words), words=words)


def test_a_plan_has_the_settings_of_each_stage(tmp_path):
    """It begins with the first; the next ones follow where that ends."""
    plan = launched(tmp_path)
    assert (plan.settings.stage.name, plan.is_last_stage) == ("pre", False)
    later = plan.in_stage(1, first_step=80, first_generation=3)
    assert (later.settings.stage.first_step, later.is_last_stage) == (80, True)
    assert later.settings.optim.learning_rate == 0.002
    assert plan.as_written.stage is None
    assert len(set(plan.settings.stage.digests)) == 2


SHORT = {"name": "pre", "max_steps": 3}
LONG = {"name": "tune", "max_steps": 30}


def test_steps_to_profile_are_of_the_whole_run(tmp_path):
    """A stage that is over before them is no reason to refuse; only the end of all is, where it is known."""
    words = ["--profile", "steps=10:12"]
    assert launched(tmp_path, *words, stages=(SHORT, LONG)).settings.log.profile == "steps=10:12"
    launched(tmp_path, "--profile", "steps=30:33", stages=(SHORT, LONG))
    launched(tmp_path, "--profile", "steps=90", stages=(PRE, LONG))
    with pytest.raises(BadInputError, match="beyond the end of the run, which has 33 steps"):
        launched(tmp_path, "--profile", "steps=30:34", stages=(SHORT, LONG))


def test_a_note_says_of_which_stage_it_is(tmp_path):
    """Where it is not of all."""
    short = {**TUNE, "max_steps": 10, "warmup_steps": 20}
    plan = launched(tmp_path, stages=(PRE, short), shares=[3, 1], batch_size=8)
    notes = [note for note in plan.notes if "warmup_steps=20" in note or "data.shares" in note]
    assert [note.partition(" ")[0] for note in notes] == ["data.shares:", "stage"]
    assert notes[1].startswith("stage tune: optim.warmup_steps=20 is not below run.max_steps=10")


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        (["--stage", "tunes"], {}, "--stage=tunes: no such stage; did you mean tune?"),
        (["--stage", "x"], {}, "--stage=x: no such stage; there are pre, tune"),
        (
            [],
            {"stages": (PRE, {**TUNE, "init_from": "previous:ema"})},
            "stage tune: init_from=previous:ema: stage pre keeps no average: give it ema_decay",
        ),
        (["--stage", "tune"], {}, "of which there is no checkpoint"),
        (["--nnodes", "2", "--rdzv-endpoint", "h"], {}, "are for one machine"),
        ([], {"preload": True}, "data.preload=true: cannot be combined with stages"),
        ([], {"only_trained": True}, "cannot be combined with stages"),
        (
            [],
            {"stages": (PRE, {**TUNE, "optim.unfreeze": "a@1", "static_graph": True})},
            "stage tune",
        ),
        ([], {"stages": (PRE, {**TUNE, "init_from": "no.pt"})}, "stage tune: --init-from=no.pt"),
        (
            [],
            {"stages": (PRE, {**TUNE, "run.task": "no.py"})},
            "stage tune: --task=no.py: no such file",
        ),
        (["--stage", "pre"], {"stages": ()}, "--stage=pre: this run has no stages"),
    ],
)
def test_what_cannot_be_trained_is_found_before_anything_starts(tmp_path, words, changes, said):
    """Also in a stage that would come hours later; nothing is made."""
    with pytest.raises(BadInputError) as caught:
        launched(tmp_path, *words, **changes)
    assert said in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"stages.yaml"}
