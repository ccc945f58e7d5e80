"""Who saves before a run ends that cannot go on, and what is said of it."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.election import EMPTY_STEP, ReplicaProgress
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.last_save import (
    AskToSave,
    Leaving,
    NothingToSave,
    SaveOutcome,
    WaitForRanks,
    closing_words,
    next_saver,
    why_not_saved,
)

WAIT, NOTHING = WaitForRanks(), NothingToSave()


def at(rank, step):
    return ReplicaProgress(rank=rank, committed_step=step)


def leaving(rank, step, *, saves=False):
    return Leaving(progress=at(rank, step), saves=saves)


@pytest.mark.parametrize(
    ("parked", "still", "saved_step", "may_wait", "move"),
    [
        ([at(0, 9), at(1, 10), at(2, 10)], [], 5, False, AskToSave(rank=1, step=10)),
        ([at(2, 10)], [], EMPTY_STEP, False, AskToSave(rank=2, step=10)),
        ([at(0, EMPTY_STEP), at(1, 7)], [], 5, False, AskToSave(rank=1, step=7)),
        ([at(0, 10)], [], 10, True, NOTHING),
        ([at(0, 0)], [], EMPTY_STEP, True, NOTHING),
        ([at(0, EMPTY_STEP)], [], EMPTY_STEP, True, NOTHING),
        ([], [], 5, True, NOTHING),
        ([at(0, 10)], [leaving(1, 11)], 5, True, WAIT),
        ([at(0, 10)], [leaving(1, 11)], 5, False, AskToSave(rank=0, step=10)),
        ([at(0, 10)], [leaving(1, 5)], 5, True, AskToSave(rank=0, step=10)),
        ([at(1, 10)], [leaving(0, 10, saves=True)], 5, False, WAIT),
        ([], [leaving(0, 10)], 5, False, WAIT),
        ([at(1, EMPTY_STEP)], [leaving(0, 10)], 5, False, WAIT),
        ([], [leaving(0, 10)], 10, True, NOTHING),
    ],
)
def test_who_saves(parked, still, saved_step, may_wait, move):
    """The newest that waits outside; who may still come with more is waited for, who saves for longer."""
    assert next_saver(parked, still, saved_step=saved_step, may_wait=may_wait) == move


def fault(kind, *, may_retry=True):
    return Fault(kind=kind, rank=0, step=1, cause="a cause", may_retry=may_retry)


def test_a_state_that_a_comparison_has_found_to_differ_is_not_saved():
    """Where no majority is known to be right; control: what a majority has, and any other cause."""
    differ = fault(FaultKind.REPLICA_DIVERGED, may_retry=False)
    assert "differ" in why_not_saved([fault(FaultKind.RANK_KILLED), differ])
    assert why_not_saved([fault(FaultKind.REPLICA_DIVERGED)]) == ""
    assert why_not_saved([fault(FaultKind.RANK_RAISED), fault(FaultKind.STORE_DIED)]) == ""


@pytest.mark.parametrize(
    ("outcome", "newest", "resume", "words"),
    [
        (
            SaveOutcome(step=40, path="c/40.pt"),
            (40, "c/40.pt"),
            "auto",
            "step 40 is saved in c/40.pt: run the same command again to resume",
        ),
        (
            SaveOutcome(),
            (40, "c/40.pt"),
            "none",
            "step 40 is saved in c/40.pt: run the same command again with --resume auto to resume",
        ),
        (
            SaveOutcome(step=40, cause="a full disk"),
            (35, "c/35.pt"),
            "last",
            (
                "step 40 could not be saved: a full disk; newest checkpoint: step 35 of 40 in "
                "c/35.pt: run the same command again to resume"
            ),
        ),
        (
            SaveOutcome(),
            (35, "c/35.pt"),
            "auto",
            "newest checkpoint: step 35 of 40 in c/35.pt: run the same command again to resume",
        ),
        (SaveOutcome(), None, "auto", "there is no checkpoint: the same command starts at step 0"),
        (
            SaveOutcome(step=40, path="r/40.pt", is_rescued=True),
            (35, "c/35.pt"),
            "auto",
            "step 40 is saved, but not with the other checkpoints: resume from it with --resume r/40.pt",
        ),
    ],
)
def test_the_last_line_says_what_is_saved_and_what_next(outcome, newest, resume, words):
    """What was tried and failed is in it, with the reason."""
    assert closing_words(outcome, newest=newest, committed_step=40, resume=resume) == words
