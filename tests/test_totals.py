"""What is counted over all ranks instead of for each: loader workers of a machine, batches of a step."""

from __future__ import annotations

import pytest

from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.config import (
    check_relations,
    difference,
    from_flat,
    resolve,
    resume_key,
    to_yaml,
    ways_on,
)
from ddp_runner.core.batch_sizes import global_batch, refuse_uneven_accumulation
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.loading.stream_order import too_little


@pytest.mark.parametrize("preset", ["cpu", "cpu_test", None])
def test_a_total_of_workers_wins_over_what_presets_have(preset):
    """Nobody has chosen that number for each rank."""
    data = resolve(command_line=[("workers_total", "6")], preset=preset).settings.data
    assert (data.workers_total, data.num_workers) == (6, "auto")


def test_workers_for_each_rank_or_in_all_as_the_later_source(tmp_path):
    """As for all settings; a file that a run has written may be given again, and changed."""
    file = tmp_path / "run.yaml"
    file.write_text("num_workers: 2\n")
    data = resolve(files=[file], command_line=[("workers_total", "6")]).settings.data
    assert (data.workers_total, data.num_workers) == (6, "auto")
    file.write_text(to_yaml(from_flat({"workers_total": 6})))
    assert resolve(files=[file]).settings.data.workers_total == 6
    data = resolve(files=[file], command_line=[("num_workers", "2")]).settings.data
    assert (data.workers_total, data.num_workers) == (None, 2)


def test_both_numbers_of_workers_at_once_are_refused():
    """With the two values, on the command line and in Python."""
    given = {"workers_total": "6", "num_workers": "2"}
    line = "data.workers_total=6: and data.num_workers=2 (for each rank): leave out one of them"
    for settings in (resolve(command_line=list(given.items())).settings, from_flat(given)):
        with pytest.raises(BadInputError) as caught:
            check_relations(settings)
        assert str(caught.value) == line


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"accumulation_total": 40, "accumulation": 10},
            "data.accumulation=10: is of each rank, and data.accumulation_total=40 of all together",
        ),
        (
            {"accumulation_total": 40, "global_batch_size": 64},
            "data.accumulation_total=40: and data.global_batch_size say the same: leave out one",
        ),
    ],
)
def test_a_step_whose_size_is_given_twice_is_refused(given, line):
    """Whichever of the words it is given by."""
    with pytest.raises(BadInputError) as caught:
        check_relations(from_flat(given))
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("total", "ranks", "devices", "line"),
    [
        (40, 4, 4, ""),
        (40, 1, 8, ""),
        (0, 3, 3, ""),
        (40, 3, 3, "must be a multiple of the 3 ranks: take 39 or 42; or global_batch_size=160"),
        (2, 4, 4, "must be a multiple of the 4 ranks: take 4; or global_batch_size=8"),
        (40, 1, 3, "must be a multiple of the 3 devices: take 39 or 42; or"),
    ],
)
def test_a_total_accumulation_is_a_multiple_of_the_ranks(total, ranks, devices, line):
    """Otherwise the line names the nearest ones, and the setting that any number of ranks can share."""
    data = from_flat({"batch_size": 4, "accumulation_total": total}).data
    found = ""
    try:
        refuse_uneven_accumulation(data, ranks=ranks, devices=devices)
    except BadInputError as error:
        found = str(error)
    assert found.removeprefix(f"data.accumulation_total={total}: ").startswith(line)
    assert bool(found) == bool(line)


def test_shares_part_a_total_that_is_no_multiple():
    """They say how unlike the parts are to be."""
    data = from_flat({"batch_size": 4, "accumulation_total": 40, "shares": [3, 3, 2]}).data
    refuse_uneven_accumulation(data, ranks=3, devices=3)


def test_a_total_is_one_batch_on_any_number_of_ranks(tmp_path, monkeypatch):
    """So a resume with fewer ranks is the same run; one that counts for each rank is another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_RUNNER_COMMAND", "ddp-runner")
    total, each = from_flat({"accumulation_total": 40}), from_flat({"accumulation": 10})
    assert [global_batch(total.data, world_size=n) for n in (1, 2, 4)] == [1280] * 3
    key = resume_key(total, world_size=4)
    assert difference(key, resume_key(total, world_size=2)) == []
    assert difference(key, resume_key(each, world_size=4)) == []
    smaller = resume_key(each, world_size=2)
    assert difference(key, smaller) == ["data.batch_size x ranks: 1280 -> 640"]
    assert "global_batch_size=640 accumulation_total=0" in ways_on(
        total, old=smaller, new=key, world_size=4
    )


@pytest.mark.parametrize("word", ["shares=1,1,1", "accumulation_total=3"])
def test_ranks_of_another_launcher_are_counted_by_it(word, tmp_path, monkeypatch):
    """Not as many as the command would start: each rank checks the parts by itself."""
    monkeypatch.chdir(tmp_path)
    names = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    for name, value in {**names, "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    plan_launch(parse_train(["--cpu", word]), words=[])


def test_data_that_has_no_step_of_a_total_is_named_by_it():
    """Not by ranks, which the number does not depend on."""
    settings = from_flat({"batch_size": 4, "accumulation_total": 40})
    error = too_little(settings, size=100, global_batch=160, world_size=2)
    line = "--batch-size=4: times accumulation_total=40 needs 160 samples a step, the data has 100"
    assert str(error).startswith(line)
