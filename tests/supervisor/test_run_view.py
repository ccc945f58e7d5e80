"""What status.json and the display show: put together from the board and the newest reports."""

from __future__ import annotations

import json
import math
import os
from types import SimpleNamespace

import pytest

from ddp_runner.core.launch_plan import DevicePlan, LaunchPlan
from ddp_runner.core.settings import DataSettings, RunSettings, Settings
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_facts import RunFacts
from ddp_runner.kernel.processes.operating_system import Linux
from ddp_runner.kernel.processes.rank_process import RankProcess
from ddp_runner.kernel.rules.lifecycle import RankEvent, RunState
from ddp_runner.kernel.rules.phases import Phase, Stage
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell
from ddp_runner.kernel.wire.messages import Ready
from ddp_runner.observe.files import encode_record
from ddp_runner.observe.loss_history import LossHistory
from ddp_runner.observe.summary import RunFindings, TimeShares
from ddp_runner.observe.view import status_record
from ddp_runner.supervisor.reporting.recorder import Evaluated
from ddp_runner.supervisor.reporting.run_view import Around, run_view

WORLD = 2
BATCH = 4


NOW_NS = 1_000_000_000_000
FACTS = RunFacts(run_id="a run", generation=2, steps_per_epoch=10, inexact_reasons=["a reason"])


@pytest.fixture
def handles():
    board = Board(memoryview(bytearray(WORLD * SLOT_BYTES)), WORLD)
    return [RankHandle(rank, slot=board.slot(rank)) for rank in range(WORLD)]


def device(rank):
    return DevicePlan(device=f"cuda:{rank}", name="a GPU", visible_index=rank)


def plan():
    settings = Settings(
        run=RunSettings(task="synthetic", epochs=3, log_dir="the/logs"),
        data=DataSettings(batch_size=BATCH),
    )
    return LaunchPlan(
        settings=settings,
        origins={},
        devices=tuple(device(rank) for rank in range(WORLD)),
        world_size=WORLD,
        threads_per_rank=1,
        resume_key={},
        settings_digest="0",
        command=("test",),
        notes=(),
    )


def look(handles, *, facts=FACTS, time_s=None, evaluated=None, is_stopped=False, **changes):
    accounting = SimpleNamespace(
        began_s=NOW_NS / 1e9 - 5.0,
        faults_total=1,
        restarts=1,
        newest_faults=lambda count, *, now_s: (),
        shares=lambda reading, *, now_s: time_s or TimeShares(),
    )
    recorder = SimpleNamespace(
        facts=facts,
        findings=RunFindings(inexact_reasons=facts.inexact_reasons, is_stopped=is_stopped),
        accounting=accounting,
        evaluated=evaluated,
        losses=LossHistory(),
    )
    arguments = {"state": RunState.RUNNING, "doing": ("", 0.0), "now_ns": NOW_NS, **changes}
    around = Around(trackers={"csv": "metrics.csv"})
    return run_view(plan(), handles, recorder, around=around, **arguments)


def ready(rank, steps_per_epoch=10):
    return Ready(
        rank=rank,
        committed_step=0,
        run_id="",
        total_steps=25,
        steps_per_epoch=steps_per_epoch,
        train_samples=80,
        parameters=7,
        device="cpu",
    )


def train(handle, *, step, loss=0.5, total=25):
    """The board and reports of a rank that trains."""
    handle.ready = ready(handle.rank)
    handle.slot.set(Cell.COMMITTED_STEP, step)
    handle.slot.set(Cell.TOTAL_STEPS, total)
    handle.slot.set(Cell.EPOCH, step // 10)
    handle.slot.set(Cell.STEP_NS, 200_000_000)
    handle.slot.set(Cell.LAST_COMMIT_NS, NOW_NS)
    handle.slot.set_loss(loss)
    handle.slot.stamp(Phase.FORWARD, NOW_NS - 3_000_000_000)


def test_a_run_that_has_just_begun_knows_nothing_yet(handles):
    """None stands for "not known", never a zero that looks like a measurement."""
    view = look(handles, state=RunState.STARTING, facts=RunFacts())
    assert (view.step, view.max_steps, view.epochs) == (0, 0, 3)
    assert (view.loss, view.samples_per_s, view.eta_s, view.logged_step) == (None,) * 4
    assert [rank.loss for rank in view.ranks] == [None, None]
    assert [rank.pid for rank in view.ranks] == [0, 0]
    assert [rank.phase_age_s for rank in view.ranks] == [0.0, 0.0]
    assert [rank.state for rank in view.ranks] == ["waiting", "waiting"]


def test_a_rank_that_builds_says_what_and_is_not_dead(handles):
    """Until a process is asked for it waits; what the start is at is reported with its seconds."""
    handles[0].begin(now_s=3.0, loads=True)
    handles[0].slot.set(Cell.STAGE, Stage.MODEL)
    view = look(handles, state=RunState.STARTING, doing=("building model", 3.25))
    assert [rank.state for rank in view.ranks] == ["starting", "waiting"]
    assert [rank.building for rank in view.ranks] == ["building model", ""]
    assert (view.doing, view.doing_s) == ("building model", 3.25)
    handles[0].machine.advance(RankEvent.EXITED)
    assert look(handles).ranks[0].state == "dead"


def test_a_run_that_trains_is_seen_on_the_board(handles):
    """Step of the furthest rank, loss and epoch of the first, phase and age of each."""
    train(handles[0], step=12)
    train(handles[1], step=13)
    view = look(handles)
    assert (view.step, view.max_steps, view.epoch, view.epochs) == (13, 25, 1, 3)
    assert (view.generation, view.faults_total, view.restarts) == (2, 1, 1)
    assert view.inexact_reasons == ("a reason",)
    assert view.loss == 0.5
    assert view.elapsed_s == pytest.approx(5.0)
    assert [rank.step for rank in view.ranks] == [12, 13]
    assert all(rank.phase == "forward" for rank in view.ranks)
    assert all(rank.phase_age_s == pytest.approx(3.0) for rank in view.ranks)
    assert [rank.device for rank in view.ranks] == ["cuda:0", "cuda:1"]


def test_the_newest_evaluation_is_known_by_the_names_of_its_figures(handles):
    """Not one that is behind the ranks' step: they went back to a checkpoint, and evaluate again."""
    figures = {"all/loss": 2.5, "bach/accuracy": math.nan}
    assert (look(handles).evaluated, look(handles).evaluated_step) == ({}, None)
    train(handles[0], step=12)
    view = look(handles, evaluated=Evaluated(step=12, figures=figures))
    assert (view.evaluated, view.evaluated_step) == (figures, 12)
    record = json.loads(encode_record(status_record(view)))
    assert record["evaluated"] == {"all/loss": 2.5, "bach/accuracy": None}
    assert record["evaluated_step"] == 12
    train(handles[0], step=9)
    undone = look(handles, evaluated=Evaluated(step=12, figures=figures))
    assert (undone.evaluated, undone.evaluated_step) == ({}, None)


def test_the_epochs_are_known_while_the_rank_that_reported_them_is_replaced(handles):
    """Fifty steps of ten an epoch are five, whatever the settings say of epochs."""
    for handle in handles:
        train(handle, step=12, total=50)
    handles[0].ready = None
    assert look(handles).epochs == 5


def test_the_remaining_time_comes_from_one_step_without_a_rate(handles):
    """Then from the samples per second that the ranks report."""
    for handle in handles:
        train(handle, step=15)
    assert look(handles).eta_s == pytest.approx(10 * 0.2)
    handles[0].metrics = {"samples_per_s": 40.0, "step": 10, "learning_rate": 0.1}
    view = look(handles)
    assert view.eta_s == pytest.approx(10 * BATCH * WORLD / 40.0)
    assert (view.logged_step, view.learning_rate) == (10, 0.1)


def test_a_reported_step_has_its_own_loss_and_epoch(handles):
    """Ranks are steps ahead of it; the first rank that has reported counts."""
    for handle in handles:
        train(handle, step=15, loss=1.0)
    handles[1].metrics = {"step": 10, "epoch": 0.0, "loss": 2.0}
    view = look(handles)
    assert (view.logged_step, view.logged_epoch, view.logged_loss) == (10, 0, 2.0)
    assert (view.step, view.epoch, view.loss) == (15, 1, 1.0)


def test_goodput_is_of_the_time_since_the_first_step(handles):
    """As in the summary; unknown before anything was done."""
    view = look(handles, time_s=TimeShares(startup=1.0, productive=2.0))
    assert (view.goodput, view.time_s["startup"]) == (0.5, 1.0)
    assert status_record(view)["time_s"]["productive"] == 2.0
    assert look(handles, time_s=TimeShares(startup=5.0)).goodput is None
    assert look(handles).goodput is None


def test_a_complete_run_has_no_time_remaining(handles):
    """Not even where the last rank is a step ahead of the total."""
    for handle in handles:
        train(handle, step=25)
    assert look(handles).eta_s == 0.0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_not_shown(handles, loss):
    """status.json stays readable by everybody."""
    train(handles[0], step=3, loss=loss)
    assert look(handles).loss is None


def test_the_record_has_what_scripts_rely_on(handles):
    """Programs read these names."""
    train(handles[0], step=3)
    record = status_record(look(handles))
    assert {
        "run_id",
        "pid",
        "state",
        "generation",
        "world_size",
        "step",
        "max_steps",
        "faults_total",
        "ranks",
    } <= record.keys()
    assert {
        "rank",
        "pid",
        "state",
        "step",
        "phase",
        "phase_age_s",
        "rss_bytes",
        "device",
        "loader_pids",
    } <= record["ranks"][0].keys()
    assert (record["pid"], record["state"]) == (os.getpid(), "running")


def test_memory_is_measured_of_ranks_that_live(simulate):
    """One that has just ended keeps its last figure and is no error."""
    assert Linux().resident_bytes(os.getpid()) > 1_000_000
    assert Linux().resident_bytes(2**22 + 1) == 0  # beyond the highest pid there can be
    run = simulate(ranks=2)
    run.to_step(5)
    run.resident = {run.rank(0).pid: 7}
    run.world.ranks[1].rss_bytes = 5
    run.world.measure_memory()
    assert [handle.rss_bytes for handle in run.world.ranks] == [7, 5]


def test_states_that_are_nobodys_business_outside_are_shown_by_their_old_words(handles):
    """Until it is reaped a killed rank is on its way out; one that had finished is not dead."""
    for handle in handles:
        handle.begin(now_s=3.0, loads=False)
    handles[0].machine.advance(RankEvent.KILL_SENT)
    for event in (RankEvent.GOT_READY, RankEvent.GOT_FINISHED, RankEvent.EXITED):
        handles[1].machine.advance(event)
    assert [rank.state for rank in look(handles).ranks] == ["aborting", "finished"]
    handles[0].machine.advance(RankEvent.EXITED)
    assert look(handles).ranks[0].state == "dead"


def test_a_rank_without_a_process_is_dead_until_one_is_asked_for(handles):
    """A new one forgets what the process before had reported."""
    handle = handles[0]
    handle.metrics = {"samples_per_s": 1.0}
    assert not handle.is_alive
    handle.begin(now_s=3.0, loads=False)
    assert handle.is_alive
    assert (handle.pid, handle.processes, handle.ready, handle.metrics) == (None, 1, None, {})
    handle.machine.advance(RankEvent.EXITED)
    assert not handle.is_alive


def test_what_a_process_wrote_before_its_log_is_read(tmp_path):
    """It vanishes with them."""
    process = RankProcess(0, log_dir=tmp_path)
    theirs, output = process.open_lines(token=7, now_s=3.0)
    os.write(output, b"last words\n")
    assert process.what_it_wrote().before_log == "last words"
    os.close(theirs)
    process.close_lines()
    assert process.what_it_wrote().before_log == ""


@pytest.mark.parametrize(("step", "is_stopped"), [(12, True), (12, False), (25, True)])
def test_a_run_that_was_stopped_is_not_shown_as_done(handles, step, is_stopped):
    """Unless it has come to its end all the same; status.json says done in either case."""
    for handle in handles:
        train(handle, step=step)
    view = look(handles, state=RunState.DONE, is_stopped=is_stopped)
    assert view.shown_state == ("stopped" if (step, is_stopped) == (12, True) else "done")
    record = status_record(view)
    assert record["state"] == "done"
    assert "is_stopped" not in record
