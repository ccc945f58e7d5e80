"""``data.shares=auto`` at a launch: what it takes of a journal and of checkpoints, and where it is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ddp_runner.__main__ import main
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.cli.hardware.devices import with_shares
from ddp_runner.config import from_flat
from ddp_runner.core.launch_plan import DevicePlan
from tests.checkpoint.states import facts_of

FAST, SLOW = "NVIDIA H100", "NVIDIA A100"


def settings(folder, **more):
    places = {"log_dir": str(folder / "logs"), "checkpoint_dir": str(folder / "checkpoints")}
    return from_flat({"data.shares": "auto", **places, **more})


def devices(*names):
    return [
        DevicePlan(device=f"cuda:{index}", name=name, visible_index=index)
        for index, name in enumerate(names)
    ]


def journal(folder, *events):
    (folder / "logs").mkdir(exist_ok=True)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in events]
    (folder / "logs" / "events.jsonl").write_text("".join(f"{one}\n" for one in lines))


def proposal(*shares, names=(FAST, SLOW)):
    return {"event": "shares_proposed", "shares": shares, "devices": names}


def launched(folder, *names, **more):
    found, lines = with_shares(settings(folder, **more), devices(*names), is_alone=True)
    return found.data.shares, "".join(lines)


@pytest.mark.parametrize(
    ("events", "shares"),
    [
        ((), "auto"),
        ((proposal(3, 1),), (3, 1)),
        ((proposal(3, 1), proposal(2, 1)), (2, 1)),  # the newest
        ((proposal(),), ()),
        ((proposal(3, 1, names=(FAST, FAST)),), "auto"),  # of other devices
        ((proposal(3, 1, 1),), "auto"),
        ((proposal(3, 0),), "auto"),
        (('{"event": "shares_proposed"}', '{"shares_proposed"', '"shares_proposed"'), "auto"),
        (({**proposal(3, 1), "shares": "x"},), "auto"),
    ],
)
def test_a_fresh_start_takes_the_newest_proposal_for_its_devices(tmp_path, events, shares):
    """Else auto stays, which measures; whatever else stands in the file."""
    journal(tmp_path, *events)
    found, line = launched(tmp_path, FAST, SLOW)
    assert found == shares
    assert ("the first steps are measured" in line) is (shares == "auto")


@pytest.mark.parametrize(
    ("recipe", "resume", "shares", "said"),
    [
        (
            {"ranks": 2, "data.shares": []},
            "auto",
            (),
            "equal shares, as this run began; data.shares=3,1",
        ),
        (
            {"ranks": 2, "data.shares": [2, 1]},
            "auto",
            (2, 1),
            "2,1, as this run began; data.shares=3,1",
        ),
        ({"ranks": 2, "data.shares": [3, 1]}, "last", (3, 1), "3,1, as this run began"),
        ({"ranks": 3, "data.shares": [2, 1, 1]}, "auto", (), "equal shares, as this run began"),
        ({}, "auto", (), "equal shares, as this run began"),
        ({"ranks": 2, "data.shares": [2, 1]}, "none", (3, 1), "3,1, as an earlier launch measured"),
    ],
)
def test_a_resume_keeps_the_shares_of_its_checkpoint(tmp_path, recipe, resume, shares, said):
    """A proposal would change its steps in the middle; only a fresh start takes it."""
    journal(tmp_path, proposal(3, 1))
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=3)
    store.save({"model": {}}, replace(facts_of(5), recipe=recipe))
    found, line = launched(tmp_path, FAST, SLOW, resume=resume)
    assert found == shares
    assert f"data.shares=auto: {said}" in line


def test_a_resume_measures_for_the_next_fresh_start(tmp_path):
    """Where nothing was proposed yet, and shares are equal."""
    CheckpointStore(tmp_path / "checkpoints", keep_last=3).save({"model": {}}, facts_of(5))
    assert launched(tmp_path, FAST, SLOW)[0] == "auto"


def test_numbers_and_one_rank_are_left_as_they_are(tmp_path):
    """Control: nothing is read for shares that were given; one rank has nothing to share."""
    assert launched(tmp_path, FAST) == ((), "data.shares=auto: the only rank has all samples")
    given = replace(settings(tmp_path), data=replace(settings(tmp_path).data, shares=(2, 1)))
    assert with_shares(given, devices(FAST, SLOW), is_alone=True) == (given, ())


NO_MACHINE = ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1"]
AS_A_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ((NO_MACHINE, {}), "is not measured on several machines"),
        (([], AS_A_RANK), "needs a supervisor, which measures the ranks"),
    ],
)
def test_auto_is_refused_where_nobody_measures(tmp_path, monkeypatch, capsys, case, said):
    """One line with the cure, exit code 2."""
    words, environment = case
    monkeypatch.chdir(tmp_path)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    own = ["task=synthetic", "--cpu", "data.shares=auto", *(() if environment else ("-n", "2"))]
    assert main(["train", *own, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data.shares=auto: " in line
    assert said in line
    assert "give a number for each rank" in line
