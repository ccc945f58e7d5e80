"""Layout of the live display, and the plain text beside it."""

from dataclasses import replace

import pytest
from rich.cells import cell_len

from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.observe.progress_report import (
    FAULTS_SHOWN_MAX,
    exact_text,
    fault_sentence,
    progress_line,
    summary_block,
)
from ddp_runner.observe.summary import ExactProof
from tests.observe.views import drawn, rank_view, run_summary, run_view, style_of, text_of


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 300])
@pytest.mark.parametrize("world_size", [1, 8])
def test_every_line_fits_the_width(width, world_size):
    """No line is wider than the terminal (40 columns are the least), whatever the figures."""
    wild = {"step": 12_345_678, "rss_bytes": 10**14, "loss": -1.5e30, "phase_age_s": 1e7}
    ranks = tuple(
        rank_view(rank, state="recovering", phase="checkpoint", device="cuda:10", **wild)
        for rank in range(world_size)
    )
    view = run_view(
        world_size, ranks=ranks, max_steps=98_765_432, title="t" * 60, samples_per_s=9e9
    )
    lines = text_of(drawn(view, width=width, lines_max=15))
    assert max(len(line) for line in lines) <= max(40, width)


@pytest.mark.parametrize("width", [80, 120])
def test_eighty_columns_show_every_column(width):
    """At 80 columns every column of the table is there, and the table is a rectangle."""
    ranks = (rank_view(0), rank_view(1, phase="reduce", phase_age_s=12.3, step=929))
    lines = text_of(drawn(run_view(2, ranks=ranks), width=width, lines_max=15))
    assert "bytes" in lines[1]
    assert "20261120-194720-ab12" in lines[1]
    assert lines[1].endswith("12:34")
    assert lines[2].endswith("62%  epoch 2/10  step 930/1,500")
    assert lines[3].startswith(" loss 2.3456  samples/s 1,234")
    assert "eta 2m 03s" in lines[3]
    columns = ["rank", "device", "state", "step", "phase", "loss", "samples/s", "data", "memory"]
    assert lines[5].split() == columns
    assert lines[6].split() == [
        "0",
        "cpu",
        "running",
        "930",
        "forward",
        "2.3456",
        "617",
        "1%",
        "0.4",
        "GB",
    ]
    assert lines[7].split() == [
        "1",
        "cpu",
        "running",
        "929",
        "reduce",
        "12s",
        "2.3456",
        "617",
        "1%",
        "0.4",
        "GB",
    ]
    assert len({len(line) for line in lines[5:-1]}) == 1, "the table is a rectangle"
    assert lines[-1] == " Ctrl-C saves and stops"


def test_the_name_of_a_run_comes_first_and_its_task_next():
    """A task's name is not repeated where it is the run's; the id of the run is left out before either is cut."""
    named = run_view(name="warmup-2", title="synthetic")
    assert text_of(drawn(named))[1].startswith(" warmup-2  synthetic  20261120-194720-ab12 ")
    assert text_of(drawn(named, width=40))[1].split() == [
        "warmup-2",
        "synthetic",
        "running",
        "12:34",
    ]
    assert text_of(drawn(run_view(name="mine", title="mine.py")))[1].startswith(" mine  2026")


def test_colours_distinguish_states():
    """Running is good, recovering needs care, dead is bad; quiet things are quiet."""
    ranks = (rank_view(0), rank_view(1, state="recovering"), rank_view(2, state="dead"))
    lines = drawn(run_view(3, ranks=ranks, faults_total=1, restarts=2))
    assert style_of(lines[6:], "running") == "green"
    assert style_of(lines, "recovering") == "yellow"
    assert style_of(lines, "dead") == "bold red"
    assert style_of(lines, "1 fault, 2 restarts") == "yellow"
    quiet = drawn(run_view(1))
    assert style_of(quiet, "no faults") == "dim"


@pytest.mark.parametrize(
    ("step", "max_steps", "text"),
    [(0, 100, "0%"), (50, 100, "50%"), (999, 1000, "99%"), (100, 100, "100%"), (5, 0, "0%")],
)
def test_the_bar_is_full_only_at_the_end(step, max_steps, text):
    """The share is rounded down, so that 100% means done; an unknown total shows no progress."""
    bar = text_of(drawn(run_view(step=step, max_steps=max_steps)))[2]
    assert f" {text} " in bar


def test_unknown_figures_are_dashes():
    """Before the first step nothing is known, and the display says so."""
    ranks = (rank_view(0, loss=None, samples_per_s=None, data_wait_share=None, rss_bytes=0),)
    view = run_view(1, ranks=ranks, loss=None, samples_per_s=None, eta_s=None, state="starting")
    lines = text_of(drawn(view))
    assert lines[6].split() == ["0", "cpu", "running", "930", "forward", "-", "-", "-", "-"]
    assert "loss -" in lines[3]


def test_a_terminal_without_unicode_gets_ascii():
    """The ASCII frame has no other characters."""
    assert "".join(text_of(drawn(run_view(), encoding="ascii"))).isascii()


def test_wide_characters_take_two_columns():
    """A title of them moves nothing to its right, and what is cut says so."""
    lines = drawn(run_view(title="模型" * 20), width=60)
    assert cell_len(text_of(lines)[1]) == 59
    assert "… running" in text_of(lines)[1]


def test_text_of_a_run_is_one_line_and_nothing_to_obey():
    """Neither a line end, a tab nor an escape sequence gets to the terminal from the name of a task."""
    lines = text_of(drawn(run_view(title="a\nb\tc\x1b[2J[red]")))
    assert lines[1].startswith(r" a b c\x1b[2J[red]  20261120-194720-ab12")
    assert len(lines) == len(text_of(drawn(run_view())))


def test_without_colours_the_rest_of_the_bar_is_blank(monkeypatch):
    """Else it would look like what is done."""
    bars = {}
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        bars[value] = text_of(drawn(run_view(step=0)))[2]
    assert "━" in bars[""]
    assert "━" not in bars["1"]
    assert len(bars[""]) == len(bars["1"])


FIGURES = {"all/loss": 2.5, "all/accuracy": 0.75, "bach/loss": 3.25, "bach/accuracy": 0.5}


def evaluated_line(width, figures, lines_max=15):
    view = run_view(evaluated=figures, evaluated_step=900)
    lines = text_of(drawn(view, width=width, lines_max=lines_max))
    return next((line.strip() for line in lines if line.startswith(" evaluated")), "")


def test_the_figures_of_the_newest_evaluation_are_shown_by_name():
    """Whole ones, as many as fit, and how many more there are; nothing where nothing was evaluated."""
    assert evaluated_line(120, FIGURES) == (
        "evaluated all/loss 2.5000  all/accuracy 0.7500  bach/loss 3.2500  bach/accuracy 0.5000"
        "  after step 900"
    )
    assert evaluated_line(60, FIGURES) == ("evaluated all/loss 2.5000  and 3 more  after step 900")
    assert evaluated_line(40, {"validation_loss": 2.5}) == "evaluated validation_loss 2.5000"
    assert evaluated_line(40, {"a_rather_long_name_of/validation_loss": 2.5}).startswith(
        "evaluated a_rather_long_name_of"
    )
    assert evaluated_line(120, {}) == ""


def test_ranks_go_before_figures_where_there_is_no_room():
    """A small terminal keeps the rows of its ranks."""
    assert evaluated_line(120, FIGURES, lines_max=10)
    view = run_view(8, evaluated=FIGURES, evaluated_step=900)
    assert not any("evaluated" in line for line in text_of(drawn(view, width=120, lines_max=10)))


def test_progress_line():
    """The plain line holds every figure that people compare; unknown ones are left out."""
    assert progress_line(run_view()) == (
        "step 930/1,500  epoch 2/10  loss 2.3456  lr 3.0e-04  grad 0.91  1,234 samples/s  data 1%"
        "  mem 0.4 GB  eta 2m 03s"
    )
    bare = run_view(
        0,
        logged_loss=None,
        learning_rate=None,
        grad_norm=None,
        samples_per_s=None,
        eta_s=None,
        epochs=0,
    )
    assert progress_line(bare) == "step 930/1,500  epoch 2"
    ahead = run_view(step=940, logged_step=930, logged_epoch=0, logged_loss=2.5)
    assert progress_line(ahead).startswith("step 930/1,500  epoch 1/10  loss 2.5000  lr ")


def test_a_run_is_shown_by_name_and_id():
    """A summary from before runs had names has the id alone."""
    block = summary_block(run_summary(run_id="0af3", name="mine"), log_dir="logs", width=80)
    assert any(line.split() == ["run", "mine", "(0af3)"] for line in block)
    block = summary_block(run_summary(run_id="0af3"), log_dir="logs", width=80)
    assert any(line.split() == ["run", "0af3"] for line in block)


def test_summary_block_counts_the_steps_that_were_skipped():
    """They changed the training, and no repair shows them; a failed save is no skipped step."""
    (fault,) = run_summary().faults
    skip = replace(fault, kind="loss_exploded", action="step skipped on all ranks")
    save = replace(fault, kind="storage_failed", action="skipping the next checkpoint")
    block = summary_block(run_summary(tolerated=(skip, skip, save)), log_dir="logs", width=80)
    (line,) = [line for line in block if "skipped" in line]
    assert line.split()[:3] == ["skipped", "2", "steps:"]
    assert "skipped" not in "".join(summary_block(run_summary(), log_dir="logs", width=80))
    many = summary_block(run_summary(tolerated=(skip,) * 500), log_dir="logs", width=80)
    assert "at least 500 steps" in "\n".join(many)


def test_summary_block_shows_people_everything():
    """Status, steps, loss, figures, goodput, faults with repair time, digest, checkpoint, logs."""
    lost = {"node1": 3, "node2": 1}
    block = summary_block(run_summary(machines_lost=lost), log_dir="logs", width=80)
    text = "\n".join(block)
    for part in (
        "node1 was lost 3 times, node2 was lost once",
        "completed",
        "1,500 steps, 48,000 samples, 2 ranks",
        "1.7312",
        "validation bits per byte  2.4971",
        "goodput 90%",
        "1, 1 repaired in 1.8s, 1 step done again",
        "step 412: rank 1 was killed by SIGKILL, repaired",
        "checkpoints/step_00001500.pt",
        "logs",
    ):
        assert part in text
    assert "ab12cd34ef56\n" in text, "twelve characters of the digest"
    assert max(len(line) for line in block) < 80


def test_repairs_at_the_same_time_count_once():
    """Five processes killed at once are not repaired in five times the time."""
    (fault,) = run_summary().faults
    spans = [(10.0, 12.0), (10.5, 12.0), (11.0, 13.0), (20.0, 21.0)]
    faults = tuple(replace(fault, detected_s=a, recovered_s=b) for a, b in spans)
    before = replace(faults[0], launches_ago=1)
    for made, words in (
        (faults, "4, 4 repaired in 4.0s"),
        ((*faults, before), "5 repaired in 6.0s"),
    ):
        block = summary_block(run_summary(faults=made), log_dir="logs", width=80)
        assert words in "\n".join(block)


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        ({}, "exact yes weights"),
        ({"repeated": 1, "drilled": (2,)}, "yes (first step repeated; drill passed at step 2)"),
        ({"drilled": (2, 50, 1000)}, "yes (drills passed at steps 2, 50 and 1,000)"),
        ({"drilled": tuple(range(9))}, "yes (9 drills passed)"),
        ({"repairs_proved": "1 of 1"}, "yes (1 of 1 repairs proved)"),
    ],
)
def test_summary_block_says_what_proves_an_exact_run(proof, words):
    """Steps are named as long as they are few."""
    block = summary_block(run_summary(exact_proof=ExactProof(**proof)), log_dir="logs", width=80)
    assert words in " ".join(" ".join(block).split())


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_summary_block_is_broken_between_words(width):
    """On a narrow terminal as well, which would break lines anywhere; only a path may be longer."""
    block = summary_block(run_summary(), log_dir="logs", width=width)
    path = "checkpoints/step_00001500.pt"
    assert max(len(line) for line in block if path not in line) < min(width, 80)
    text = " ".join(" ".join(block).split())
    for part in ("1,500 steps, 48,000 samples, 2 ranks", "validation bits per byte 2.4971", path):
        assert part in text


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({}, "interrupted and saved: run the same command again to resume"),
        ({"checkpoint_step": 1500}, "interrupted and saved: run the same command again to resume"),
        ({"checkpoint_step": 1450}, "interrupted and ended at once; newest checkpoint: step 1,450"),
        ({"checkpoint": None}, "interrupted and ended at once: there is no checkpoint"),
    ],
    ids=["an older summary", "saved", "not saved", "nothing ever"],
)
def test_summary_block_says_of_a_stop_whether_it_saved(saved, words):
    """Only a file of the very last step is called saved."""
    summary = run_summary(status=RunStatus.INTERRUPTED, exit_code=130, **saved)
    text = " ".join(" ".join(summary_block(summary, log_dir="logs", width=80)).split())
    assert words in text
    assert text.count("interrupted") == 1


def test_summary_block_of_a_failed_run():
    """No figure is made up: an unknown loss has no row, inexact runs say why, many faults are cut."""
    (fault,) = run_summary().faults
    summary = run_summary(
        status=RunStatus.FAILED,
        exit_code=1,
        final_loss=None,
        weights_sha256=None,
        checkpoint=None,
        exact=False,
        inexact_reasons=("batches were split",),
        faults=(fault,) * (FAULTS_SHOWN_MAX + 3),
    )
    text = "\n".join(summary_block(summary, log_dir="logs", width=80))
    assert "failed" in text
    assert "no: batches were split" in text
    assert "and 3 more, in events.jsonl" in text
    assert "\n loss" not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"all_ranks_dead": True, "steps_lost": 7}, "in 1.8s, all ranks were dead, 7 steps again"),
        ({"all_ranks_dead": True, "steps_lost": 0}, "in 1.8s, all ranks were dead"),
        ({}, "in 1.8s, 1 step again"),
    ],
)
def test_a_fault_that_no_rank_outlived_says_so(changes, said):
    """Only that may cost steps; it is why they are done again."""
    (fault,) = run_summary().faults
    assert fault_sentence(replace(fault, **changes)).endswith(said)


def test_a_start_says_what_it_is_at():
    """In place of a step that is not there: what is built, by whom, and who waits for a process."""
    ranks = (
        rank_view(
            0,
            state="starting",
            phase="startup",
            building="building model",
            step=0,
            phase_age_s=90.0,  # since it began to build data; the model is at it for 75 s
        ),
        rank_view(1, state="starting", phase="startup", building="reading checkpoint", step=0),
        rank_view(2, state="waiting", phase="idle", step=0),
    )
    view = run_view(
        3, ranks=ranks, state="starting", step=0, max_steps=0, doing="building model", doing_s=75.2
    )
    lines = drawn(view)
    assert text_of(lines)[2].endswith("  building model 1:15")
    assert "epoch" not in "".join(text_of(lines)), "how many there are is not known yet"
    assert "90s" not in "".join(text_of(lines))
    assert [line.split()[2:5] for line in text_of(lines)[6:]] == [
        ["starting", "0", "model"],
        ["starting", "0", "checkpoint"],
        ["waiting", "0", "-"],
    ]
    assert style_of(lines, "waiting") == "dim"


def test_a_script_has_no_epochs_to_show():
    """Nobody knows of any: its optimizer steps stand for them, in the frame and in the line."""
    view = run_view(2, epochs=None, max_steps=0, step=12, loss=None, eta_s=None)
    lines = "\n".join(text_of(drawn(view)))
    assert "optimizer steps 12" in lines
    assert not any(word in lines for word in ("epoch", "%", "/?", "loss", "samples/s", "data"))
    starting = text_of(drawn(replace(view, doing="importing", doing_s=12.0)))
    assert starting[2].startswith(" importing 0:12 ")
    assert "epoch" not in progress_line(view)
    assert lines.endswith(" Ctrl-C stops"), "a script saves by itself, or not"


def test_a_run_that_was_stopped_is_not_done():
    """The last frame after a Ctrl-C says so."""
    view = run_view(2, state="done", step=12, is_stopped=True)
    assert "stopped" in text_of(drawn(view))[1]
    assert "done" not in text_of(drawn(view))[1]


def test_a_run_without_a_step_is_neither_exact_nor_not():
    """There are no weights to compare."""
    assert exact_text(run_summary(steps=0, exact=None)) == "- (no step was made)"
    assert exact_text(run_summary()).startswith("yes")
