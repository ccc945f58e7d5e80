"""The live display where there is more to show than lines: ranks summed up, and what is unusual of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_runner.core.gpu_reading import GpuReading
from ddp_runner.features.display.rank_table import in_groups, unusual
from ddp_runner.observe.loss_history import POINTS_MAX, LossHistory, by_steps
from ddp_runner.observe.view import FaultView, GpuView, NodeView
from tests.observe.views import drawn, rank_view, run_view, style_of, text_of

MANY = 64


def many(changed=None, **changes):
    """A run of 64 ranks, of which some are as ``changed`` says."""
    changed = changed or {}
    ranks = tuple(rank_view(rank, **changed.get(rank, {})) for rank in range(MANY))
    return run_view(MANY, ranks=ranks, **changes)


def shown(view, *, width=100, lines_max=30, encoding="utf-8"):
    lines = text_of(drawn(view, width=width, lines_max=lines_max, encoding=encoding))
    return [line for line in lines if not line.startswith(" Ctrl-C")]


@pytest.mark.parametrize("width", [40, 80, 100, 200])
@pytest.mark.parametrize("lines_max", [3, 12, 18, 30])
@pytest.mark.parametrize("odd", [0, 1, 40])
def test_the_frame_fits_whatever_there_is_to_show(width, lines_max, odd):
    """No more lines and columns than there are, but for the ten and the forty that it cannot do without."""
    view = many(
        {rank: {"state": "dead", "phase_age_s": 1e6} for rank in range(odd)},
        nodes=tuple(
            NodeView(
                number=one, host=f"a-long-name-of-host-{one}", is_there=one < 3, round_trip_s=2
            )
            for one in range(1, 9)
        ),
        faults=tuple(fault(f"rank {one} " + "x" * 300) for one in range(3)),
        losses=tuple((step, 1.0 / step) for step in range(1, 200)),
        stragglers={3: 2.0, 4: 3.0},
        gpus=tuple(gpu(rank, problems=("GPU is lost",)) for rank in range(MANY)),
        tokens_per_s=1e9,
        flops_utilization=0.43,
    )
    lines = shown(view, width=width, lines_max=lines_max)
    assert len(lines) <= max(10, lines_max)
    assert max(map(len, lines)) <= max(40, width)
    assert "".join(shown(view, width=width, lines_max=lines_max, encoding="ascii")).isascii()


def fault(text="rank 1 killed (SIGKILL)", **changes):
    fields = {"step": 412, "age_s": 125.0, "repaired_s": 0.2, "is_being_repaired": False}
    return FaultView(**{"text": text, **fields, **changes})


def gpu(rank, *, node=0, age_s=1.0, **reading):
    return GpuView(node=node, ranks=(rank,), age_s=age_s, reading=GpuReading(index=rank, **reading))


def test_sixty_four_ranks_are_summed_up_and_the_odd_ones_shown():
    """Eight rows of eight, and below them who differs, and by what."""
    view = many(
        {
            13: {"state": "dead", "pid": 0},
            20: {"data_wait_share": 0.35},
            41: {"phase": "reduce", "phase_age_s": 12.0},
        },
        stragglers={50: 1.8},
    )
    lines = shown(view)
    table = lines[lines.index("") + 1 :] if lines[0] else lines[lines.index("", 1) + 1 :]
    groups = [line.split()[0] for line in table[1:9]]
    assert groups == [f"{first}-{first + 7}" for first in range(0, MANY, 8)]
    assert table[2].split()[2:4] == ["7", "running"]  # of ranks 8 to 15
    assert table[9].strip() == "4 of 64 ranks differ from the others"
    odd = {line.split()[0]: line for line in table[10:]}
    assert list(odd) == ["13", "20", "41", "50"]
    assert odd["13"].rstrip().endswith("dead")
    assert odd["20"].rstrip().endswith("waits for data")
    assert odd["41"].rstrip().endswith("12 s in reduce")
    assert odd["50"].rstrip().endswith("1.8 times as slow")
    assert len({len(line) for line in table[:9]}) == 1, "the table is a rectangle"


def test_ranks_that_are_all_alike_are_said_to_be():
    """Nobody has to look for the one that is not."""
    assert shown(many())[-1].strip() == "all 64 ranks are alike"


def test_the_worst_are_shown_where_not_all_odd_ones_fit():
    """A dead one before one that waits for data."""
    view = many({**{rank: {"data_wait_share": 0.5} for rank in range(30)}, 60: {"state": "dead"}})
    lines = shown(view, lines_max=20)
    assert any(line.strip().startswith("60 ") and "dead" in line for line in lines)
    assert any("31 of 64 ranks differ" in line and "more than are shown" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": "dead"}, "dead"),
        ({"state": "forming"}, "forming"),
        ({"step": 900}, "30 steps behind"),
        ({"phase": "data", "phase_age_s": 40.0}, "40 s in data"),
        ({"data_wait_share": 0.2}, "waits for data"),
        ({"rss_bytes": 5_000_000_000}, "much memory"),
    ],
)
def test_what_makes_a_rank_unusual(change, why):
    """Each alone, among ranks that are alike."""
    assert [(rank.rank, said) for rank, said in unusual(many({7: change}))] == [(7, why)]


@pytest.mark.parametrize(
    "change",
    [
        {"step": 929},  # a step is under way
        {"phase": "backward"},
        {"phase_age_s": 0.5},
        {"data_wait_share": 0.1},
        {"rss_bytes": 600_000_000},
        {"loss": 9.0},
    ],
)
def test_what_makes_no_rank_unusual(change):
    """Ranks are never at the same place."""
    assert unusual(many({7: change})) == []


def test_what_all_ranks_do_is_unusual_of_none():
    """At a start all wait, and in a repair all form; an evaluation takes all of them long."""
    alike = {rank: {"state": "forming", "phase_age_s": 30.0} for rank in range(MANY)}
    assert unusual(many(alike)) == []


def test_a_gpu_that_is_hot_or_broken_is_shown_with_its_rank():
    """A power cap is how many are run; heat is not."""
    view = many(
        gpus=(
            gpu(3, throttling=("power cap",), use=0.9),
            gpu(5, throttling=("power cap", "hardware thermal slowdown"), use=0.4),
            gpu(9, problems=("GPU is lost",)),
            gpu(11, ecc_uncorrected=2),
        )
    )
    assert [(rank.rank, why) for rank, why in unusual(view)] == [
        (5, "GPU is too hot"),
        (9, "GPU has a problem"),
        (11, "GPU memory errors"),
    ]
    line = next(line for line in shown(view) if line.startswith(" gpu "))
    assert line == " gpu rank 5 and 2 more: hardware thermal slowdown of the GPU"


def test_an_old_word_of_a_driver_is_said_to_be_old():
    """Its last reading stays, with its age."""
    lines = shown(many(gpus=(gpu(0, age_s=45.0, use=0.9), gpu(1, age_s=2.0))))
    assert " gpu the driver's last reading is 45.0s old" in lines


def test_gpus_have_columns_where_they_are_known():
    """Use, memory and temperature; a run on CPUs has none of it."""
    on_gpu = run_view(
        2,
        ranks=tuple(rank_view(rank, device=f"cuda:{rank}", cpu_share=1.5) for rank in range(2)),
        gpus=tuple(
            gpu(rank, use=0.93, memory_used_bytes=41_000_000_000, temperature_c=61.0)
            for rank in range(2)
        ),
    )
    lines = shown(on_gpu, width=120)
    assert lines[-3].split()[-6:] == ["memory", "cpu", "gpu", "gpu", "mem", "temp"]
    assert lines[-1].split()[-5:] == ["150%", "93%", "41.0", "GB", "61"]
    assert "gpu" in shown(on_gpu, width=80)[-3]
    assert "gpu" not in shown(run_view(2), width=120)[-3]


def test_machines_are_named_with_their_way_and_who_is_gone():
    """By number and host; one that waits for a place is a spare."""
    nodes = (
        NodeView(number=1, host="b", is_there=True, round_trip_s=0.0012),
        NodeView(number=2, host="c", is_there=False, round_trip_s=None),
        NodeView(number=-1, host="d", is_there=True, round_trip_s=0.0004),
    )
    lines = drawn(run_view(2, nodes=nodes), width=100, lines_max=20)
    said = " nodes 2 of 3 are there, node 2 is not, node 1 b 1.2 ms, 1 more waits for a place"
    assert said in text_of(lines)
    often = replace(nodes[1], losses=3, left_out_s=250.0)
    said = " nodes 1 of 2 are there, node 2 is not (lost 3 times, left out for 4m 10s)"
    assert said in shown(run_view(2, nodes=(often,)))
    assert style_of(lines, ", node 2 is not") == "bold red"
    many_nodes = tuple(
        NodeView(number=one, host=f"h{one}", is_there=True, round_trip_s=one / 1000)
        for one in range(1, 8)
    )
    said = " nodes 8 of 8 are there, the farthest is node 7 h7 7.0 ms"
    assert said in shown(run_view(2, nodes=many_nodes))


def test_groups_are_machines_where_there_are_several():
    """Neighbours of one machine belong together; more machines than rows are put together by number."""
    ranks = [rank_view(rank, node=rank // 16) for rank in range(MANY)]
    assert [len(group) for group in in_groups(ranks, 8)] == [16] * 4
    ranks = [rank_view(rank, node=rank // 4) for rank in range(MANY)]
    assert [len(group) for group in in_groups(ranks, 8)] == [8] * 8
    alone = [rank_view(rank) for rank in range(10)]
    assert [len(group) for group in in_groups(alone, 4)] == [3, 3, 3, 1]


def test_faults_have_their_age_and_what_became_of_them():
    """The newest first; one that is being repaired stands out."""
    faults = (
        fault(age_s=3700.0),
        fault("rank 2 hung", age_s=125.0, repaired_s=None),
        fault("rank 0 raised", age_s=0.4, repaired_s=None, is_being_repaired=True),
    )
    lines = shown(run_view(2, faults=faults), lines_max=20)
    assert [line for line in lines if line.startswith(" fault")] == [
        " fault 0.4s ago  being repaired  step 412: rank 0 raised",
        " fault 2m 05s ago  not repaired  step 412: rank 2 hung",
        " fault 1h 01m ago  repaired in 0.2s  step 412: rank 1 killed (SIGKILL)",
    ]
    few = shown(run_view(2, faults=faults), lines_max=10)
    assert sum(line.startswith(" fault") for line in few) < 3
    assert few[-1].split()[0] == "1", "ranks come before older faults"


def test_the_curve_of_the_loss_falls_from_left_to_right():
    """Equal stretches of steps, however many points each has; three points are no curve."""
    falling = tuple((step, 9.0 - step) for step in range(1, 9))
    assert by_steps(falling, stretches=8) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert by_steps(falling, stretches=4) == [7.5, 5.5, 3.5, 1.5]
    assert by_steps(((0, 8.0), (1, 8.0), (100, 1.0)), stretches=9) == [8, 8, 1]
    assert by_steps(((5, 1.0),), stretches=9) == [1]
    lines = shown(run_view(2, losses=falling), lines_max=20)
    assert " loss █▇▆▅▄▃▂▁  from 8.0000, lowest 1.0000" in lines
    assert not any("lowest" in line for line in shown(run_view(2, losses=falling[:3])))
    newest = shown(run_view(2, losses=falling, loss=0.5), lines_max=20)
    assert any(line.endswith("lowest 0.5000") for line in newest), "lower than any of the points"


def test_the_curve_of_a_long_run_forgets_what_is_done_again():
    """However many steps; after a roll-back the curve goes on from there, and NaN is no point."""
    history = LossHistory()
    for step in range(1, 100_001):
        history.add(step, 1.0 / step)
    points = history.points()
    assert POINTS_MAX // 2 <= len(points) <= POINTS_MAX
    assert (points[0][0], points[-1][0]) == (1, 100_000)
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))
    history.add(50_000, 7.0)
    history.add(50_000, 8.0)  # of another rank
    history.add(50_001, float("nan"))
    assert history.points()[-1] == (50_000, 8.0)
    assert all(step < 50_000 for step, _ in history.points()[:-1])


def test_rates_of_tokens_stand_beside_those_of_samples():
    """Where there is room; of the peak only where somebody knows it."""
    view = run_view(2, tokens_per_s=1.2e6, flops_utilization=0.431)
    assert " eta 2m 03s  of peak 43%  tokens/s 1.20M " in shown(view, width=120)[3]
    narrow = shown(replace(view, faults_total=12, restarts=10), width=70)[3]
    assert narrow.split()[-7:-4] == ["eta", "2m", "03s"], "a whole figure or none of it"
    assert "of peak" not in shown(replace(view, flops_utilization=None), width=120)[3]
