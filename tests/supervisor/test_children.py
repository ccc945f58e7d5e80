"""Reaping and ending real processes, in a process of their own that adopts orphans."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ddp_runner import start
from ddp_runner.kernel.processes import children
from ddp_runner.kernel.processes.children import (
    OUTPUT_SHOWN_BYTES,
    end_descendants,
    is_killed,
    kill,
    make_output_file,
    read_output,
    reap_children,
    signal_main_thread,
)
from ddp_runner.kernel.system import parent_death
from ddp_runner.start import STACKS_SIGNAL
from tests.processes import poll, run_ranks


def fork_that(action):
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return pid


def reap_all(pids):
    """Every end of ``pids``, by pid."""
    ended = {}

    def reaped():
        ended.update({end.pid: end for end in reap_children()})
        return set(pids) <= ended.keys()

    poll(reaped, what="the ends")
    return ended


def _who_was_killed(me):
    pids = [fork_that(action) for action in (signal.pause, signal.pause, lambda: os._exit(9))]
    try:
        os.kill(pids[0], signal.SIGKILL)
        for pid in (pids[0], pids[2]):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return [is_killed(pid) for pid in (*pids, None)]
    finally:
        os.kill(pids[1], signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def test_who_was_killed_is_known_before_it_is_reaped():
    """Control: who lives was not, nor who left by itself."""
    assert run_ranks(_who_was_killed, 1)[0] == [True, False, False, False]


def _reap_different_ends(me):
    before_ns = time.monotonic_ns()
    zero = fork_that(lambda: None)
    three = fork_that(lambda: os._exit(3))
    killed = fork_that(signal.pause)
    os.kill(killed, signal.SIGKILL)
    ended = reap_all([zero, three, killed])
    in_order = all(before_ns <= end.at_ns <= time.monotonic_ns() for end in ended.values())
    facts = [(ended[pid].exit_code, ended[pid].signal_number) for pid in (zero, three, killed)]
    return facts, in_order, list(reap_children())


def test_how_a_child_ended_is_reported_exactly():
    """An exit code or a signal, never both, with the time it was noticed; each once."""
    ((facts, in_order, more),) = run_ranks(_reap_different_ends, 1)
    assert facts == [(0, None), (3, None), (None, signal.SIGKILL)]
    assert in_order
    assert more == []


def _reap_while_some_live(me):
    alive = fork_that(signal.pause)
    gone = fork_that(lambda: None)
    ended = reap_all([gone])
    still = psutil.Process(alive).status() != psutil.STATUS_ZOMBIE
    kill(alive)
    return list(ended) == [gone], still, reap_all([alive])[alive].signal_number


def test_reaping_never_waits_for_a_child_that_lives():
    """Control: it is not counted, and its end comes when it comes."""
    assert run_ranks(_reap_while_some_live, 1) == [(True, True, signal.SIGKILL)]


def _kill_what_has_gone(me):
    pid = fork_that(lambda: None)
    reap_all([pid])
    kill(pid)
    return list(reap_children())


def test_killing_what_has_been_reaped_is_no_error():
    """Two reasons to kill may come together."""
    assert run_ranks(_kill_what_has_gone, 1) == [[]]


def _family(depth, width):
    """Processes below this one that ignore polite signals; some stopped."""
    pids = []
    for number in range(width):
        pid = os.fork()
        if pid == 0:
            for number_of_signal in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number_of_signal, signal.SIG_IGN)
            if depth:
                _family(depth - 1, width)
            while True:
                signal.pause()
        pids.append(pid)
        if number == 0 and depth == 0:
            os.kill(pid, signal.SIGSTOP)
    return pids


def _end_a_family(me):
    parent_death.adopt_orphans()
    _family(1, 3)
    poll(lambda: len(psutil.Process().children(recursive=True)) == 12, what="the family")
    began_s = time.monotonic()
    left = end_descendants(timeout_s=60.0)
    took_s = time.monotonic() - began_s
    try:
        zombie = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        zombie = None
    return left, took_s, zombie


def test_everything_below_is_ended_and_reaped():
    """Grandchildren, deaf and stopped ones too; nothing stays and no zombie is left."""
    ((left, took_s, zombie),) = run_ranks(_end_a_family, 1)
    assert left == []
    assert took_s < 30.0
    assert zombie is None


FORKS_MAX = 300  # a limit on processes would meet every other test too


def _fork_while_being_ended(me):
    """A process that keeps forking is caught in the end."""
    parent_death.adopt_orphans()
    pid = os.fork()
    if pid == 0:
        for _ in range(FORKS_MAX):
            if os.fork() == 0:
                signal.pause()
            time.sleep(0.001)
        signal.pause()
    poll(lambda: len(psutil.Process().children(recursive=True)) > 5, what="some forks")
    left = end_descendants(timeout_s=60.0)
    return left, psutil.Process().children(recursive=True)


def test_a_process_that_forks_meanwhile_is_ended_with_its_forks():
    """It is looked again until nothing is left."""
    assert run_ranks(_fork_while_being_ended, 1) == [([], [])]


def _end_an_idle_one(me):
    """The policy of a child, with idle processor time only, when it is killed."""
    found = []

    def killing(pid):
        found.append(os.sched_getscheduler(pid))
        kill(pid)

    pid = os.fork()
    if pid == 0:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        signal.pause()
    poll(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE, what="its policy")
    children.kill = killing
    return end_descendants(timeout_s=60.0), found[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process more of the processor")
def test_a_drill_ends_at_once_on_a_busy_machine():
    """With idle time alone it would need more than ten seconds to be gone, and would be said not to end."""
    assert run_ranks(_end_an_idle_one, 1) == [([], os.SCHED_OTHER)]


def _end_nothing(me):
    began_s = time.monotonic()
    left = end_descendants(timeout_s=60.0)
    return left, time.monotonic() - began_s < 30.0


def test_ending_nothing_takes_no_time():
    """Control: a run whose ranks have all exited."""
    assert run_ranks(_end_nothing, 1) == [([], True)]


def test_the_end_of_an_output_is_what_is_shown():
    """The last words count; what came before is cut, and broken characters do no harm."""
    descriptor = make_output_file("test")
    assert read_output(descriptor) == ""
    subprocess.run([sys.executable, "-c", "print('x' * 50)"], stdout=descriptor, check=True)
    assert read_output(descriptor) == "x" * 50
    os.write(descriptor, b"y" * (2 * OUTPUT_SHOWN_BYTES) + "é".encode()[:1] + b"the end\n")
    shown = read_output(descriptor)
    assert shown.endswith("the end")
    assert "x" not in shown
    assert len(shown) <= OUTPUT_SHOWN_BYTES
    os.close(descriptor)


def test_an_output_file_has_no_name_on_any_disk():
    """It vanishes with its last descriptor."""
    descriptor = make_output_file("test")
    assert str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith("(deleted)")
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_output(descriptor)


@pytest.mark.parametrize("pid", [0, -1])
def test_a_number_that_means_a_group_is_never_signalled(pid):
    """Zero would be the supervisor's own group, and whoever called it."""
    with pytest.raises(ValueError, match="no process"):
        kill(pid, 0)


TIMES_STOPPED = 40


def stop_again_and_again(output):
    """Stops itself, with threads beside it that could take a signal as well."""
    faulthandler.register(signal.SIGUSR2, file=output, all_threads=True)
    for _ in range(4):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    for _ in range(TIMES_STOPPED):
        stop_here()
        sum(range(200_000))
    os._exit(0)


def stop_here():
    os.kill(os.getpid(), signal.SIGSTOP)


def _ask_a_stopped_process(me, path):
    with path.open("wb") as output:
        pid = fork_that(lambda: stop_again_and_again(output))
    process = psutil.Process(pid)
    for count in range(1, TIMES_STOPPED + 1):
        poll(lambda: process.status() == psutil.STATUS_STOPPED, what="the stop")
        signal_main_thread(pid, signal.SIGUSR2)
        os.kill(pid, signal.SIGCONT)
        poll(
            lambda count=count: path.read_text().count(" in stop_again_and_again") >= count,
            what="stacks",
        )
    return reap_all([pid])[pid].exit_code


def test_a_stopped_process_shows_the_place_where_it_stopped(tmp_path):
    """Its main thread takes the signal, before it goes on; with kill(2) another thread might."""
    path = tmp_path / "stacks"
    assert run_ranks(_ask_a_stopped_process, 1, path) == [0]
    places = re.findall(r"in (stop_here|stop_again_and_again)$", path.read_text(), re.MULTILINE)
    assert places.count("stop_here") == TIMES_STOPPED


HANGS = """
import select, sys
from ddp_runner.kernel.parent.signal_box import SignalBox
def hang():
    print("hangs", flush=True)
    sys.stdin.readline()
def main(words):
    hang()
    box = SignalBox()
    with box.installed():
        hang()
        select.select([box], [], [])
        print(box.take())
    return 0
"""


def test_a_supervisor_that_hangs_writes_where_when_asked(tmp_path):
    """To its standard error, before it supervises too; it continues, and a stop signal still reaches its loop."""
    (tmp_path / "hangs.py").write_text(HANGS)
    command = [sys.executable, start.__file__, "hangs"]
    where = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, env=where, **pipes) as process:
        for _ in range(2):
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(STACKS_SIGNAL)
            while not (line := process.stderr.readline()).endswith(" in hang\n"):
                assert line
            process.stdin.write("\n")
            process.stdin.flush()
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate()
    assert (said, process.returncode) == (f"[{int(signal.SIGTERM)}]\n", 0)
