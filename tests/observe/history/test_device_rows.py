"""What ranks and GPUs are shown to do and to use: whatever a run's files say of it, and nothing that they do not."""

from __future__ import annotations

import json

from ddp_runner.core.gpu_reading import GpuReading
from ddp_runner.observe.history.figures import Look, curves_figure, panels, timeline_figure
from ddp_runner.observe.history.metrics_history import Curves
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.observe.history.table_rows import (
    GPU_COLUMNS,
    RANK_COLUMNS,
    FaultRows,
    gpu_rows,
    rank_rows,
    shown_columns,
)
from ddp_runner.observe.history.timeline import Timeline
from tests.observe.history.test_run_history import KILLED, event, point


def test_who_is_slow_is_what_the_run_says(tmp_path):
    """While it trains by its status, afterwards by its summary; what is none of it is left out."""
    (tmp_path / "status.json").write_text('{"stragglers": {"2": 3.0, "x": 1.5, "1": "slow"}}')
    run = RunHistory(tmp_path, name="run")
    run.read_status()
    assert run.state.stragglers == {2: 3.0}
    (tmp_path / "status.json").unlink()
    (tmp_path / "summary.json").write_text('{"stragglers": {"0": 1.5}}')
    run.read_status()
    assert run.state.stragglers == {0: 1.5}


def test_a_table_has_the_columns_that_say_something():
    """A run without loader workers, on one machine, and ranks of nobody: no empty columns, and no error."""
    ranks = [
        {"rank": 0, "state": "training", "step": 5, "rss_bytes": 2e9, "cpu_share": 1.5, "data_wait_share": 0.25},
        {"rank": "x", "phase_age_s": [], "rss_bytes": None, "cpu_share": "much", "node": None},
    ]  # fmt: skip
    rows = rank_rows(ranks, own_s={0: 0.03, 1: 0.01}, slow={0: 3.0})
    assert (rows[0]["cores"], rows[0]["wait"], rows[0]["own"]) == ("1.50", "25%", "30.0 ms")
    assert rows[0]["slow"] == "3.0 times the others"
    shown = [key for key, _ in shown_columns(RANK_COLUMNS, rows)]
    assert "node" not in shown
    assert "loaders" not in shown
    assert {"memory", "cores", "slow"} <= set(shown)
    assert "node" in [
        key for key, _ in shown_columns(RANK_COLUMNS, rank_rows([{"node": 1}], own_s={}, slow={}))
    ]


def test_a_gpu_is_shown_as_its_driver_says():
    """Also the age of what it has said, once that is old, and what needs a person."""
    reading = GpuReading(
        index=1, name="H100", use=0.5, memory_used_bytes=40_000_000_000, memory_total_bytes=80_000_000_000,
        temperature_c=71.0, power_w=600.0, throttling=("power cap",), problems=("lost",),
    )  # fmt: skip
    record = {"node": 0, "ranks": (0, 2), "age_s": 40.0, **reading.to_record()}
    (row,) = gpu_rows([json.loads(json.dumps(record))])
    assert row["gpu"] == "1 H100"
    assert (row["ranks"], row["use"], row["memory"]) == ("0, 2", "50%", "40.0 GB of 80.0 GB")
    assert (row["temperature"], row["power"], row["clock"]) == ("71 °C", "600 W", "-")
    assert (row["said"], row["trouble"]) == ("40.0s old", "power cap, lost")
    assert "clock" not in [key for key, _ in shown_columns(GPU_COLUMNS, [row])]
    assert gpu_rows([{}, {"ranks": 7, "power_w": "x", "name": None}])[1]["gpu"] == "0"


def test_what_is_used_has_panels_of_its_own():
    """Memory in GB and by rank stands in both; the rest of it only beside the ranks."""
    names = ["loss", "rss_bytes", "gpu_use", "loader_bytes", "device_total_bytes", "epoch"]
    assert panels(names) == [["loss"], ["rss_bytes"]]
    assert panels(names, of_use=True) == [["rss_bytes"], ["gpu_use"], ["loader_bytes"]]
    curves = Curves()
    curves.add(point(step, rank=rank, rss_bytes=2e9, cpu_share=1.0) for step in (1, 2) for rank in (0, 1))  # fmt: skip
    figure = curves_figure(curves, [], Look(of_use=True))
    assert [line["y"][0] for line in figure["data"]] == [2.0, 2.0, 1.0, 1.0]
    assert [line["showlegend"] for line in figure["data"]] == [True, True, False, False]
    assert figure["layout"]["yaxis2"]["title"]["text"] == "host memory (GB)"


def test_a_stage_is_a_mark_where_it_begins():
    """With its name, and a line through the curves."""
    rows = FaultRows()
    rows.add(event(1, "stage_begins", at=1, stage="tune", of=2, first_step=40, step=55))
    (mark,) = rows.marks
    assert (mark.kind, mark.step, mark.text) == ("stage", 40, "stage tune")
    figure = curves_figure(Curves(), rows.marks, Look())
    assert len(figure["layout"]["shapes"]) == 1


def test_a_repair_stands_where_training_goes_on():
    """As the event says; one of an older run is as far back as steps were lost."""
    for named, step in (({"step": 17}, 17), ({}, 20)):
        rows = FaultRows()
        for one in KILLED:
            rows.add(one | named if one["event"] == "repaired" else one)
        marks = {mark.kind: mark.step for mark in rows.marks}
        assert (marks["repair"], marks["roll back"]) == (step, step)


def test_the_ranks_of_a_machine_stand_together():
    """Each named after it, with a line between two machines; on one machine there is nothing of it."""
    timeline = Timeline()
    for one in (event(0, "run_begins", world_size=4), event(1, "world_formed", at=1, generation=1)):
        timeline.add(one)
    figure = timeline_figure(timeline, dark=False, now_s=0.0, nodes={0: 0, 1: 1, 2: 0, 3: 1})
    rows = figure["layout"]["yaxis"]["categoryarray"]
    assert rows[::-1] == ["node 0, rank 0", "node 0, rank 2", "node 1, rank 1", "node 1, rank 3"]
    lines = [shape for shape in figure["layout"]["shapes"] if shape["yref"] == "y"]
    assert [line["y0"] for line in lines] == [1.5]
    one = timeline_figure(timeline, dark=False, now_s=0.0, nodes=dict.fromkeys(range(4), 0))
    assert one["layout"]["yaxis"]["categoryarray"][0] == "rank 3"
    assert all(shape["yref"] != "y" for shape in one["layout"]["shapes"])
