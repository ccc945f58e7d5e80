"""Facts about a failure -> its kind, and who began it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_runner.kernel.rules.classify import (
    VICTIM_KINDS,
    RankExit,
    attribute,
    classify_error,
    classify_exit,
)
from ddp_runner.kernel.rules.crash_output import CrashOutput
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin


def fault(kind, rank, at_ns):
    return Fault(kind=kind, rank=rank, step=1, cause=f"{kind.value} on {rank}", at_ns=at_ns)


def ended(**facts):
    base = {
        "rank": 1,
        "step": 60,
        "phase": "reduce",
        "at_ns": 1,
        "exit_code": None,
        "signal_number": None,
    }
    return classify_exit(RankExit(**{**base, **facts}))


def test_a_signal_is_named():
    """People know SIGKILL, not 9."""
    killed = ended(signal_number=9)
    assert killed.kind is FaultKind.RANK_KILLED
    assert killed.cause == "rank 1 killed (SIGKILL)"


def test_a_kill_by_the_kernel_for_memory_is_no_mystery():
    """The repair is another one: half the micro-batch."""
    killed = ended(signal_number=9, killed_for_memory=True)
    assert killed.kind is FaultKind.OUT_OF_MEMORY
    assert killed.cause == "rank 1 killed by the kernel: out of memory"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("CUDA error: device-side assert triggered", FaultKind.DEVICE_LOST),
        ("CUDA error: an illegal memory access was encountered", FaultKind.DEVICE_LOST),
        ("free(): invalid pointer", FaultKind.RANK_KILLED),
        ("CUDA out of memory", FaultKind.RANK_KILLED),
    ],
)
def test_a_destructor_that_meets_a_lost_device_ends_the_process(reason, kind):
    """As on an H200: the error in C++ aborts the process before Python hears of it."""
    crash = CrashOutput(reason=reason, text=f"what():  {reason}")
    died = ended(signal_number=6, crash=crash, place="in drop, bucket_sums.py:73")
    assert died.kind is kind
    assert died.cause == f"rank 1 killed (SIGABRT in drop, bucket_sums.py:73: {reason})"
    assert ended(signal_number=9, crash=None).kind is FaultKind.RANK_KILLED


@pytest.mark.parametrize(
    ("facts", "origin"),
    [
        ({"signal_number": 9}, Origin.OUTSIDE),
        ({"signal_number": 15}, Origin.OUTSIDE),
        ({"signal_number": 9, "killed_for_memory": True}, Origin.OWN),
        ({"signal_number": 11}, Origin.UNCLEAR),
        ({"signal_number": 7, "place": "in loss, task.py:31"}, Origin.UNCLEAR),
        ({"exit_code": 0}, Origin.OWN),
        ({"exit_code": 7}, Origin.OWN),
    ],
)
def test_who_may_have_brought_an_end_about(facts, origin):
    """Somebody else sends SIGKILL; what a process brings upon itself may have been sent as well."""
    assert ended(**facts).origin is origin


@pytest.mark.parametrize(
    ("reason", "origin"), [("free(): invalid pointer", Origin.OWN), ("", Origin.UNCLEAR)]
)
def test_a_crash_that_says_why_was_not_sent(reason, origin):
    """Nobody outside makes the C library say so; that it stood in a line of code is no proof."""
    crash = CrashOutput(reason=reason, text="Fatal Python error: Aborted")
    assert ended(signal_number=6, crash=crash, place="in loss, task.py:31").origin is origin


def test_exit_zero_before_the_end_is_a_fault():
    """A rank that leaves politely still leaves its peers waiting."""
    assert ended(exit_code=0).kind is FaultKind.RANK_EXITED


@pytest.mark.parametrize(
    ("type_name", "text", "aborted", "kind"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried", False, FaultKind.OUT_OF_MEMORY),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", False, FaultKind.OUT_OF_MEMORY),
        ("MemoryError", "", False, FaultKind.OUT_OF_MEMORY),
        ("_ArrayMemoryError", "Unable to allocate 8.00 EiB for an array", False, FaultKind.OUT_OF_MEMORY),
        ("OSError", "[Errno 12] Cannot allocate memory", False, FaultKind.OUT_OF_MEMORY),
        ("RuntimeError", "Expected to have finished reduction in the prior iteration", False, FaultKind.REDUCTION_UNFINISHED),
        ("BackendCompilerFailed", "backend='inductor' raised: CppCompileError", False, FaultKind.COMPILATION_FAILED),
        ("RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer", False, FaultKind.COLLECTIVE_FAILED),
        ("RuntimeError", "Application timeout caused pair closure", False, FaultKind.COLLECTIVE_FAILED),
        ("DistNetworkError", "The client socket has timed out", False, FaultKind.COLLECTIVE_FAILED),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", False, FaultKind.DEVICE_LOST),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False, FaultKind.OUT_OF_MEMORY),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", False, FaultKind.DEVICE_LOST),
        ("RuntimeError", "Triton Error [CUDA]: an illegal memory access was encountered", False, FaultKind.DEVICE_LOST),
        ("RuntimeError", "something went", True, FaultKind.COLLECTIVE_FAILED),
        ("RuntimeError", "something went", False, FaultKind.RANK_RAISED),
        ("ValueError", "gloo is a word in my data", False, FaultKind.RANK_RAISED),
        ("ZeroDivisionError", "division by zero", True, FaultKind.RANK_RAISED),
    ],
)  # fmt: skip
def test_an_exception_is_classified_by_type_and_text(type_name, text, aborted, kind):
    """The user's own errors stay the user's, also while a generation is being aborted."""
    assert classify_error(type_name=type_name, text=text, aborted=aborted) is kind


def test_the_first_cause_wins_over_earlier_consequences():
    """A lost peer is noticed before the one who caused it can speak, and is still no culprit."""
    found = attribute(
        [
            fault(FaultKind.COLLECTIVE_FAILED, 0, 5),
            fault(FaultKind.RANK_RAISED, 2, 9),
            fault(FaultKind.COLLECTIVE_FAILED, 1, 7),
        ]
    )
    assert found.culprit.rank == 2
    assert [victim.rank for victim in found.victims] == [0, 1]


def test_a_rank_that_reported_and_then_died_counts_once():
    """Its own words say more than its exit code."""
    found = attribute([fault(FaultKind.RANK_RAISED, 2, 5), fault(FaultKind.RANK_EXITED, 2, 6)])
    assert [cause.kind for cause in found.causes] == [FaultKind.RANK_RAISED]


def test_who_stays_in_a_stuck_collective_is_to_blame():
    """All seem to wait alike until they are told to leave; one that hangs in there cannot."""
    stuck = fault(FaultKind.COLLECTIVE_STUCK, -1, 5)
    found = attribute(
        [stuck, fault(FaultKind.COLLECTIVE_FAILED, 0, 6), fault(FaultKind.RANK_HUNG, 1, 9)]
    )
    assert [(cause.kind, cause.rank) for cause in found.causes] == [(FaultKind.RANK_HUNG, 1)]
    assert [victim.rank for victim in found.victims] == [0]
    # Controls: everybody leaves; what gloo said of a wrong size is nobody's hang.
    assert attribute([stuck, fault(FaultKind.COLLECTIVE_FAILED, 0, 6)]).culprit is stuck
    sizes = replace(stuck, is_disagreement=True)
    assert attribute([sizes, fault(FaultKind.RANK_HUNG, 1, 9)]).culprit is sizes


def test_only_victims_leave_the_earliest_to_blame():
    """When nobody knows more, the first to notice is named."""
    found = attribute(
        [
            fault(FaultKind.COLLECTIVE_FAILED, 1, 7),
            fault(FaultKind.COLLECTIVE_FAILED, 0, 5),
        ]
    )
    assert found.culprit.rank == 0
    assert [victim.rank for victim in found.victims] == [1]


@given(
    st.lists(
        st.builds(fault, st.sampled_from(FaultKind), st.integers(0, 3), st.integers(0, 99)),
        min_size=1,
    )
)
def test_attribution_holds_its_invariants(faults):
    """Whatever came in: a culprit among the causes, no victim kind beside a real cause, no rank twice."""
    found = attribute(faults)
    assert found.culprit is found.causes[0]
    real = [item for item in faults if item.kind not in VICTIM_KINDS]
    if real:
        assert all(cause.kind not in VICTIM_KINDS for cause in found.causes)
        assert found.culprit.at_ns == min(item.at_ns for item in real)
    ranks = [cause.rank for cause in found.causes]
    assert len(ranks) == len(set(ranks))


def test_nothing_cannot_be_attributed():
    """No incident without a fault."""
    with pytest.raises(ValueError, match="nothing"):
        attribute([])
