"""Which points a tracker is given, of steps that are done once, again, and never again."""

from __future__ import annotations

from ddp_runner.features.trackers.rules import Change, Course, Lead, Settled, grouped


def test_steps_done_once_undo_nothing():
    """Each line is a point, an evaluation of a step too."""
    course = Course()
    lines = [(1, {"loss": 3.0}), (2, {"loss": 2.0}), (2, {"validation_loss": 2.5})]
    assert [course.take(*line) for line in lines] == [
        Change(undo_after=None, values=values) for _, values in lines
    ]


def test_a_step_done_again_undoes_itself_and_what_follows():
    """Also the same step twice in a row."""
    course = Course(newest=40)
    assert course.take(21, {"loss": 1.0}).undo_after == 20
    assert course.take(22, {"loss": 1.0}).undo_after is None
    assert course.take(22, {"loss": 0.9}).undo_after == 21


def test_an_evaluation_done_again_is_no_second_point():
    """A resume evaluates where the run before it did; the step itself stays."""
    course = Course()
    course.take(5, {"loss": 1.0})
    course.take(5, {"validation_loss": 1.5})
    assert course.take(5, {"validation_loss": 1.5}) == Change(undo_after=None, values={})
    course.take(6, {"loss": 0.5})
    assert course.take(5, {"validation_loss": 1.5}) == Change(undo_after=5, values={})
    # Of an undone step it is one again.
    assert course.take(5, {"loss": 1.0}).undo_after == 4
    assert course.take(5, {"validation_loss": 1.4}).values == {"validation_loss": 1.4}


def test_figures_of_named_data_are_those_of_an_evaluation():
    """They do not take the step back that they are of, and count once."""
    course = Course()
    course.take(5, {"loss": 1.0, "kl/a": 2.0})
    figures = {"all/loss": 1.5, "bach/accuracy": 0.5}
    assert course.take(5, figures) == Change(undo_after=None, values=figures)
    assert course.take(5, figures) == Change(undo_after=None, values={})
    assert course.take(6, {"loss": 0.9, "kl/a": 1.0}).undo_after is None


def test_a_launch_undoes_what_is_behind_its_first_step():
    """Where it goes on from the newest step nothing is undone."""
    course = Course(newest=30)
    assert course.begin(30) is None
    assert course.begin(20) == 20
    assert course.take(21, {"loss": 1.0}).undo_after is None


def point(**values):
    return Change(undo_after=None, values=values)


def test_a_point_waits_until_its_step_is_in_a_checkpoint():
    """And until a later one shows that no evaluation of it is to come."""
    settled = Settled()
    for step in (1, 2, 3):
        assert settled.take(step, point(loss=float(step)), is_new=True)
    assert settled.due() == []
    settled.saved(2)
    assert settled.due() == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]
    settled.saved(3)
    assert settled.due() == []
    assert settled.take(3, point(validation_loss=9.0), is_new=True)
    assert settled.rest() == [(3, {"loss": 3.0, "validation_loss": 9.0})]
    assert settled.rest() == []


def test_a_point_that_is_undone_before_its_checkpoint_is_never_written():
    """What is done in its place is."""
    settled = Settled()
    for step in (1, 2, 3):
        settled.take(step, point(loss=1.0), is_new=True)
    assert settled.take(2, Change(undo_after=1, values={"loss": 2.0}), is_new=True)
    settled.saved(2)
    assert settled.rest() == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]


def test_a_written_point_that_is_undone_is_reported():
    """The tracker then needs another place to write to; one of a process before is history."""
    settled = Settled(written=5)
    change = Change(undo_after=3, values={"loss": 1.0})
    assert settled.take(4, change, is_new=False)
    assert settled.written == 5
    assert not settled.take(4, change, is_new=True)
    settled.saved(4)
    assert settled.rest() == [(4, {"loss": 1.0})]


def test_what_a_process_of_before_has_written_is_not_written_again():
    """It reads the files from their beginning."""
    settled = Settled(written=2)
    for step in (1, 2, 3):
        settled.take(step, point(loss=1.0), is_new=False)
    settled.saved(3)
    assert [step for step, _ in settled.rest()] == [3]


def test_the_first_rank_that_is_not_given_up_stands_for_the_run():
    """One that comes back does so again."""
    lead = Lead()
    assert [lead.is_it(rank) for rank in (0, 1)] == [True, False]
    lead.given_up.add(0)
    assert lead.is_it(1)
    assert lead.is_it(0)
    assert not lead.is_it(1)


def test_metrics_are_grouped_by_what_they_are_of():
    """Names of a loss's parts, and those of the task's own evaluations, stay below their group."""
    names = ("loss", "kl", "grad_norm", "validation_accuracy", "bach/loss", "step_s", "forward_ms")
    names += ("steps_per_s", "rss_bytes", "gpu_memory_used_bytes")
    assert [grouped(name).partition("/")[::2] for name in names] == [
        *(("train", name) for name in ("loss", "kl", "grad_norm")),
        *(("validation", name) for name in ("accuracy", "bach/loss")),
        *(("speed", name) for name in ("step_s", "forward_ms", "steps_per_s")),
        ("memory", "rss_bytes"),
        ("gpu", "gpu_memory_used_bytes"),
    ]
