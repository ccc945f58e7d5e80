"""What a process wrote before it died -> why, where, and what of it is kept."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.crash_output import read_crash_output, read_stack, user_frame
from ddp_runner.kernel.rules.faults import DETAIL_CHARACTERS_MAX

OWN = "/opt/run/ddp_runner"
STACK = f"""Current thread 0x00007f3d7067fb80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/u/my_task.py", line 32 in loss
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1 in _call_impl
  File "{OWN}/training/step.py", line 99 in run
"""
OTHER = """Thread 0x00007f4ce80036c0 (most recent call first):
  File "/home/u/other.py", line 5 in watch
"""
REST = "\nExtension modules: torch._C, numpy.random (total: 2)\n"
SEGFAULT = f"Fatal Python error: Segmentation fault\n\n{OTHER}\n{STACK}{REST}"
ABORTED = f"Fatal Python error: Aborted\n\n{OTHER}\n{STACK}{REST}"
MISMATCH = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data "
    "size doesn't match expected size.\n"
)
LOG = "2026-11-21 17:31:47.430 INFO    rank 1 step 20 | saved\n"


def words(said, signal_name="SIGSEGV"):
    found = read_crash_output(said, signal_name=signal_name)
    assert found is not None
    return found


def test_the_thread_that_crashed_comes_first_and_names_the_user_s_line():
    """Not the line of Python or of a package that it called, nor that of another thread."""
    found = words(LOG + SEGFAULT)
    assert found.reason == ""
    assert found.text.startswith(f"Fatal Python error: Segmentation fault\n\n{STACK}")
    assert OTHER.strip() in found.text
    assert "Extension modules" not in found.text
    assert user_frame(found.text, own=OWN) == "in loss, my_task.py:32"


def test_where_a_thread_of_c_alone_died_the_main_thread_is_named():
    """gloo's thread has no stack of Python; the main thread's is the last one written."""
    main = STACK.replace("Current thread", "Thread")
    found = words(f"{MISMATCH}Fatal Python error: Aborted\n\n{OTHER}\n{main}{REST}", "SIGABRT")
    assert user_frame(found.text, own=OWN) == "in loss, my_task.py:32"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("terminate called after throwing an instance of 'std::x'\n  what():  no such key\n", "no such key"),
        ("terminate called without an active exception\n", "terminate called without an active exception"),
        ("free(): invalid pointer\n", "free(): invalid pointer"),
        ("double free or corruption (out)\n", "double free or corruption (out)"),
        ("*** stack smashing detected ***: terminated\n", "*** stack smashing detected ***: terminated"),
        ("python: a.c:3: f: Assertion `n > 0' failed.\n", "python: a.c:3: f: Assertion `n > 0' failed."),
        ("step 20: loss 0.3\n", ""),
        (LOG, ""),
    ],
)  # fmt: skip
def test_an_abort_s_reason_is_what_the_runtime_said(said, reason):
    """And never whatever else was printed just before."""
    found = words(LOG + said + ABORTED, "SIGABRT")
    assert found.reason == reason
    assert reason in found.text


def test_python_s_own_fatal_error_is_the_reason():
    """Its title says more than that it aborted."""
    found = words(f"Fatal Python error: _enter_buffered_busy: no lock\n\n{STACK}", "SIGABRT")
    assert found.reason == "_enter_buffered_busy: no lock"


def test_gloo_s_abort_over_sizes_is_known():
    """The ranks disagree, and no process is to blame."""
    assert words(MISMATCH + ABORTED, "SIGABRT").mismatch == (8, 4)
    assert words(ABORTED, "SIGABRT").mismatch is None


@pytest.mark.parametrize(
    ("said", "signal_name"),
    [
        (SEGFAULT, "SIGKILL"),
        (SEGFAULT, "SIGTERM"),
        (SEGFAULT, "SIGABRT"),
        (ABORTED, "SIGSEGV"),
        (LOG, "SIGSEGV"),
        ("", "SIGABRT"),
    ],
)
def test_what_does_not_belong_to_the_signal_is_no_account(said, signal_name):
    """Control: a loader worker's crash in the same log is not the reason of its rank's end."""
    assert read_crash_output(said, signal_name=signal_name) is None


def test_what_is_kept_is_bounded_and_keeps_the_beginning():
    """Many threads, or the endless stack of a recursion."""
    frames = '  File "/home/u/my_task.py", line 3 in again\n' * 10_000
    found = words(SEGFAULT.replace(STACK, STACK + frames) + OTHER * 500)
    assert len(found.text) == DETAIL_CHARACTERS_MAX
    assert user_frame(found.text, own=OWN) == "in loss, my_task.py:32"


def test_of_several_dumps_the_newest_counts():
    """A loader worker crashed before its rank did."""
    earlier = SEGFAULT.replace("line 32 in loss", "line 1 in __getitem__")
    assert user_frame(words(earlier + SEGFAULT).text, own=OWN) == "in loss, my_task.py:32"


def test_the_stack_of_an_asked_rank_is_its_main_thread_s():
    """It may have been asked in both ways: over the channel, and by a signal."""
    asked = f"Thread 0x00007f4c [feeder] (most recent call first):\n{OTHER.partition(chr(10))[2]}"
    main = f"Thread 0x00007f3d [MainThread] {STACK[STACK.index('(most') :]}"
    assert user_frame(read_stack(asked + main), own=OWN) == "in loss, my_task.py:32"
    freed = STACK.replace("line 32 in loss", "line 1 in getline")
    assert read_stack(asked + main + OTHER + "\n" + freed) == main.rstrip("\n"), "it went on since"
    assert read_stack(asked + OTHER + "\n" + STACK) == STACK.rstrip("\n")
    assert read_stack(LOG) == ""


def test_a_traceback_names_its_last_line_of_the_user():
    """The one that called into torch."""
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{OWN}/training/step.py", line 99, in run\n'
        '  File "/home/u/my_task.py", line 40, in loss\n    return self.inner()\n'
        '  File "/home/u/my_task.py", line 44, in inner\n    dist.all_reduce(x)\n'
        '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 9, in all_reduce\n'
        "RuntimeError: no\n"
    )
    assert user_frame(text, own=OWN) == "in inner, my_task.py:44"
    assert user_frame(text.replace("/home/u/my_task.py", f"{OWN}/data/x.py"), own=OWN) == ""
    assert user_frame(text.replace("/home/u", f"{OWN}/tasks"), own=OWN) == "in inner, my_task.py:44"
