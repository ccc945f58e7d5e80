"""A supervised rank's surroundings, in real processes: its output, its control link, its stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from ddp_runner.features.faults.child import surround_rank
from ddp_runner.kernel.group.tcp_store import StoreLink
from ddp_runner.kernel.rank.runtime import FINISH_S, StartupOutput, SupervisedRuntime
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.system.folder_owner import FolderOwner
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell
from ddp_runner.kernel.wire.events import Faulted, LogOutage, StopSignalAtRank
from ddp_runner.kernel.wire.messages import (
    Abort,
    Checkpoint,
    CollectivesBegun,
    CopyWritten,
    Forked,
    Form,
    Ready,
    ReopenLog,
    Stacks,
    Stop,
    WriteCopy,
)
from ddp_runner.observe.logger import DDPLogger
from tests.processes import poll, ranks, run_ranks

READY = Ready(
    rank=0,
    committed_step=0,
    run_id="",
    total_steps=1,
    steps_per_epoch=1,
    train_samples=1,
    parameters=1,
    device="cpu",
)


def form(generation):
    return Form(
        generation=generation,
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        run_id="the run",
        secret="shared",
    )


def _talk(me, path):
    """Write in every way before and after the log file is attached."""
    output = StartupOutput(os.memfd_create("output"), path)
    os.write(1, b"early from C\n")
    print("early from print")
    subprocess.run([sys.executable, "-c", "print('early from a child')"], check=True)
    print("early to stderr", file=sys.stderr)
    exists_before = path.exists()
    output.attach()
    output.attach()
    print("late", flush=True)
    os.write(2, b"late from C\n")
    return exists_before


def test_what_was_said_before_the_log_file_is_copied_there_first(tmp_path):
    """Also from C and from child processes, in order, once, however often it is attached."""
    path = tmp_path / "rank_0.log"
    assert run_ranks(_talk, 1, path) == [False]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sorted(lines[:4]) == [
        "early from C",
        "early from a child",
        "early from print",
        "early to stderr",
    ]
    assert lines[4:] == ["late", "late from C"]


def _attach_to_an_old_log(me, path):
    output = StartupOutput(os.memfd_create("output"), path)
    print("new")
    output.attach()


def test_a_log_file_of_an_earlier_process_is_continued(tmp_path):
    """Appended, never cut: it may hold the traceback of why this process exists."""
    path = tmp_path / "rank_0.log"
    path.write_text("old\n", encoding="utf-8")
    run_ranks(_attach_to_an_old_log, 1, path)
    assert path.read_text(encoding="utf-8") == "old\nnew\n"


def _attach_without_streams(me, path):
    output = StartupOutput(os.memfd_create("output"), path)
    print("early", flush=True)
    sys.stdout.close()
    sys.stderr = None
    output.attach()
    os.write(1, b"late\n")


def test_a_program_may_close_its_streams_before_the_log_is_opened(tmp_path):
    path = tmp_path / "rank_0.log"
    run_ranks(_attach_without_streams, 1, path)
    assert path.read_text(encoding="utf-8") == "early\nlate\n"


def _lose_the_log(me, path):
    output = StartupOutput(os.memfd_create("output"), path)
    output.attach()
    print("before", flush=True)
    other = os.open(path.with_name("mine"), os.O_WRONLY | os.O_CREAT)
    os.dup2(other, 2)  # as user code may
    path.unlink()
    output.reopen()
    output.reopen()
    print("after", flush=True)
    os.write(2, b"still mine\n")


def test_a_log_file_that_was_removed_is_made_again(tmp_path):
    """What is said afterwards is in a new one; what user code has put on a descriptor stays there."""
    path = tmp_path / "rank_0.log"
    run_ranks(_lose_the_log, 1, path)
    assert path.read_text(encoding="utf-8") == "after\n"
    assert path.with_name("mine").read_text(encoding="utf-8") == "still mine\n"


def make_runtime(descriptor, path, **how):
    return SupervisedRuntime(
        Channel.from_descriptor(descriptor),
        rank_info=RankInfo(
            rank=0, local_rank=0, world_size=1, local_world_size=1, device="cpu", loads=True
        ),
        slot=Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0),
        logger=DDPLogger(rank=0, debug=False),
        output=StartupOutput(os.memfd_create("output"), path),
        link=StoreLink("127.0.0.1", 0, timeout_s=5.0),
        **how,
    )


def _supervise(me, path, rank_function):
    """The test commands this process, which holds the other end of a rank's channel."""
    mine, theirs = Channel.pair()
    pid = os.fork()
    if pid == 0:
        mine.close()
        rank_function(me, make_runtime(theirs.detach(), path))
        os._exit(5)
    theirs.close()
    return mine, pid


def exit_code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _wait_for_forms(me, runtime):
    for _ in range(2):
        generation = runtime.next_generation(READY)
        me.say((generation.membership.generation, runtime.run_id, generation.switch.tripped))


def _form_twice(me, path):
    channel, pid = _supervise(me, path, _wait_for_forms)
    heard = []
    for generation in (1, 4):
        heard.append(channel.receive()[0])
        channel.send(form(generation))
    return heard, exit_code_of(pid)


def test_a_rank_reports_ready_and_gets_the_generation_it_is_sent(tmp_path):
    """Each Form answers one Ready; the first opens the log file."""
    with ranks(_form_twice, 1, tmp_path / "rank_0.log") as (rank,):
        assert rank.hear() == (1, "the run", False)
        assert rank.hear() == (4, "the run", False)
        assert rank.result() == ([READY, READY], 5)
    assert (tmp_path / "rank_0.log").exists()


def _say_before_and_after(me, runtime):
    print("before", flush=True)
    for _ in range(2):
        me.say(runtime.next_generation(READY).membership.generation)
    runtime.next_generation(READY)


def _lack_a_log(me, path):
    channel, pid = _supervise(me, path, _say_before_and_after)
    heard = []
    for generation in (1, 4):
        heard.append(channel.receive()[0])
        channel.send(form(generation))
    heard += [channel.receive()[0] for _ in range(2)]
    made_before = path.exists()
    path.parent.mkdir()
    channel.send(ReopenLog())
    channel.send(form(5))
    return heard, made_before, exit_code_of(pid)


def test_a_log_that_cannot_be_made_is_reported_once(tmp_path):
    """Its output stays in memory, and is in the log as soon as that can be made."""
    path = tmp_path / "logs" / "rank_0.log"
    outage = LogOutage(
        rank=0,
        text=f"{path} cannot be written (No such file or directory); training continues without it",
    )
    with ranks(_lack_a_log, 1, path) as (rank,):
        assert (rank.hear(), rank.hear()) == (1, 4)
        assert rank.result() == ([READY, outage, READY, READY], False, 5)
    assert path.read_text(encoding="utf-8") == "before\n"


def _stand_behind_a_peer(me, runtime):
    generation = runtime.next_generation(READY)
    runtime.slot.set(Cell.COMMITTED_STEP, 5)
    if me.hear() == "broken":
        generation.switch.release()
    runtime.report(Forked(token=1, pid=1))
    began_s = time.monotonic()
    while not generation.switch.tripped and time.monotonic() < began_s + FINISH_S / 4:
        time.sleep(0.002)
    me.say(generation.switch.tripped)
    runtime.slot.set(Cell.COMMITTED_STEP, 6)
    poll(lambda: generation.switch.tripped, what="the abort")


def _abort_one_that_is_behind(me, path, newest_step):
    channel, pid = _supervise(me, path, _stand_behind_a_peer)
    channel.receive()
    channel.send(form(1))
    channel.receive()
    channel.send(Abort(generation=1, newest_step=newest_step))
    return exit_code_of(pid)


@pytest.mark.parametrize(
    ("newest_step", "step", "is_aborted_at_once"),
    [(6, "whole", False), (6, "broken", True), (5, "whole", True), (-1, "whole", True)],
)
def test_an_abort_waits_for_the_step_that_a_peer_has_committed(
    tmp_path, newest_step, step, is_aborted_at_once
):
    """Its sums are whole, and this rank may lack the last of them; not where it broke here, nor in another step."""
    path = tmp_path / "rank_0.log"
    with ranks(_abort_one_that_is_behind, 1, path, newest_step) as (rank,):
        rank.say(step)
        assert rank.hear() is is_aborted_at_once
        assert rank.result() == 5


def _report_what_is_asked(me, runtime):
    generation = runtime.next_generation(READY)
    me.say((runtime.stop_asked(), runtime.save_asked(), generation.switch.tripped))
    runtime.report(Forked(token=1, pid=1))
    poll(runtime.save_asked, what="the request to save")
    me.say(runtime.save_asked())
    poll(runtime.stop_asked, what="the stop")
    me.say(runtime.stop_asked())
    poll(lambda: generation.switch.tripped, what="the abort")


def _ask_for_things(me, path, aborts):
    channel, pid = _supervise(me, path, _report_what_is_asked)
    channel.receive()
    channel.send(form(3))
    channel.receive()
    channel.send(Checkpoint())
    channel.send(Stop(reason=StopReason.INTERRUPTED))
    for generation in aborts:
        channel.send(Abort(generation=generation))
    return exit_code_of(pid)


def test_stop_and_save_wait_for_the_trainer_unlike_an_abort(tmp_path):
    """A request to save counts once; an abort of the generation trips its switch by itself."""
    with ranks(_ask_for_things, 1, tmp_path / "rank_0.log", (2, 3)) as (rank,):
        assert rank.hear() == (None, False, False)
        assert rank.hear() is False
        assert rank.hear() is StopReason.INTERRUPTED
        assert rank.result() == 5


def _survive_a_late_abort(me, runtime):
    runtime.next_generation(READY)
    second = runtime.next_generation(READY)
    runtime.report(Forked(token=1, pid=1))
    poll(runtime.save_asked, what="what is sent after the abort")
    me.say(second.switch.tripped)


def _abort_an_earlier_generation(me, path):
    channel, pid = _supervise(me, path, _survive_a_late_abort)
    for generation in (1, 2):
        channel.receive()
        channel.send(form(generation))
    channel.receive()
    channel.send(Abort(generation=1))
    channel.send(Checkpoint())
    return exit_code_of(pid)


def test_an_abort_of_an_earlier_generation_leaves_the_newest_alone(tmp_path):
    """It comes too late for the one it was meant for."""
    with ranks(_abort_an_earlier_generation, 1, tmp_path / "rank_0.log") as (rank,):
        assert rank.hear() is False
        assert rank.result() == 5


def _change_frames_all_the_time(me, runtime):
    def deeper(levels):
        return deeper(levels - 1) if levels else 0

    runtime.next_generation(READY)
    while runtime.stop_asked() is None:
        namespace = {}
        exec("def made_again(): return 0", namespace)  # a code object that is freed again
        namespace["made_again"]()
        deeper(20)


def _ask_for_stacks(me, path, times):
    channel, pid = _supervise(me, path, _change_frames_all_the_time)
    channel.receive()
    channel.send(form(1))
    for _ in range(times):
        channel.send(Stacks())
        time.sleep(0.002)
    channel.send(Stop(reason=StopReason.INTERRUPTED))
    return exit_code_of(pid)


def test_survivors_write_their_stacks_and_live(tmp_path):
    """Asked again and again while their frames come and go; the log shows where each thread is."""
    path = tmp_path / "rank_0.log"
    assert run_ranks(_ask_for_stacks, 1, path, 60) == [5]
    written = path.read_text(encoding="utf-8")
    assert written.count("[MainThread] (most recent call first):") == 60
    assert ", line " in written
    assert " in _change_frames_all_the_time\n" in written


def _live_with_stderr_closed(me, runtime):
    runtime.next_generation(READY)
    sys.stderr.close()
    runtime.report(Forked(token=1, pid=1))
    poll(runtime.stop_asked, what="the stop")


def _ask_once_for_stacks(me, path):
    channel, pid = _supervise(me, path, _live_with_stderr_closed)
    channel.receive()
    channel.send(form(1))
    channel.receive()
    channel.send(Stacks())
    begun = channel.receive()[0]
    channel.send(Stop(reason=StopReason.INTERRUPTED))
    return begun, exit_code_of(pid)


def test_stacks_of_a_rank_that_has_closed_its_stderr_are_written_too(tmp_path):
    """What user code does to its streams costs neither the stacks nor the rank."""
    path = tmp_path / "rank_0.log"
    ((begun, code),) = run_ranks(_ask_once_for_stacks, 1, path)
    assert (type(begun), code) == (CollectivesBegun, 5)
    assert "[MainThread] (most recent call first):" in path.read_text(encoding="utf-8")


def _compute_with_the_lock_of_the_interpreter_free(me, runtime):
    runtime.report(Forked(token=1, pid=1))
    time.sleep(60)


def _hang_up(me, path):
    channel, pid = _supervise(me, path, _compute_with_the_lock_of_the_interpreter_free)
    channel.receive()
    channel.close()
    return exit_code_of(pid)


def test_a_rank_ends_when_the_supervisor_hangs_up(tmp_path):
    """Whatever it is doing; also where the kernel has no death signal."""
    assert run_ranks(_hang_up, 1, tmp_path / "rank_0.log") == [1]


def _compute_with_stderr_closed(me, runtime):
    sys.stderr.close()
    _compute_with_the_lock_of_the_interpreter_free(me, runtime)


def _send_garbage(me, path, rank_function):
    channel, pid = _supervise(me, path, rank_function)
    channel.receive()
    channel._socket.send(b"garbage")
    return exit_code_of(pid)


@pytest.mark.parametrize(
    "rank_function", [_compute_with_the_lock_of_the_interpreter_free, _compute_with_stderr_closed]
)
def test_a_rank_that_cannot_understand_its_supervisor_ends(tmp_path, rank_function):
    """A deaf rank must not live on, also where it cannot say why it ends."""
    assert run_ranks(_send_garbage, 1, tmp_path / "rank_0.log", rank_function) == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_asks_the_whole_run_to_stop(tmp_path, number):
    """The rank goes on: the supervisor decides, for all of them."""
    with ranks(_signal_the_rank, 1, tmp_path / "rank_0.log", int(number)) as (rank,):
        asked, heard_nothing_else = rank.result()
    assert asked == StopSignalAtRank(rank=0, reason=StopReason.PREEMPTED)
    assert heard_nothing_else


def _wait_for_a_stop(me, runtime):
    runtime.report(Forked(token=1, pid=1))
    poll(runtime.stop_asked, what="the stop")


def _signal_the_rank(me, path, number):
    channel, pid = _supervise(me, path, _wait_for_a_stop)
    channel.receive()
    os.kill(pid, number)
    asked, _ = channel.receive()
    channel.send(Stop(reason=StopReason.PREEMPTED))
    code = exit_code_of(pid)
    try:
        channel.receive()
    except ChannelClosedError:
        return asked, code == 5
    return asked, False


def _end_a_process_of_its_own(me, runtime):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"x")
        # Not one long sleep: a signal just before it would be handled only after it.
        for _ in range(6000):
            time.sleep(0.01)
        os._exit(0)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    me.say(exit_code_of(child))


def _hear_nothing(me, path):
    channel, pid = _supervise(me, path, _end_a_process_of_its_own)
    code = exit_code_of(pid)
    try:
        return code, channel.receive()[0]
    except ChannelClosedError:
        return code, None


def test_a_signal_to_a_fork_of_user_code_spares_the_rank(tmp_path):
    """A pool of workers is ended by SIGTERM: it ends, and no stop of the run is asked for."""
    with ranks(_hear_nothing, 1, tmp_path / "rank_0.log") as (rank,):
        assert rank.hear() == -signal.SIGTERM
        assert rank.result() == (5, None)


def _fail_with_words_left(me, runtime):
    runtime.next_generation(READY)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=4096)
    sys.stdout.write("the last words")
    sys.stderr.close()
    fault = Fault(kind=FaultKind.RANK_RAISED, rank=0, step=1, cause="a cause")
    runtime.report(Faulted(generation=1, fault=fault))
    runtime.next_generation(READY)


def _kill_who_has_failed(me, path):
    channel, pid = _supervise(me, path, _fail_with_words_left)
    channel.receive()
    channel.send(form(1))
    heard = type(channel.receive()[0])
    os.kill(pid, signal.SIGKILL)
    return heard, exit_code_of(pid)


def test_what_a_rank_printed_is_logged_before_its_fault(tmp_path):
    """It is killed as soon as it waits; a stream that user code has closed does not keep it silent."""
    outcome = run_ranks(_kill_who_has_failed, 1, tmp_path / "rank_0.log")
    assert outcome == [(Faulted, -signal.SIGKILL)]
    assert (tmp_path / "rank_0.log").read_text(encoding="utf-8").endswith("the last words")


def _publish_when_forbidden(me, folder, how):
    mine, theirs = Channel.pair()
    owner = FolderOwner(folder, "a1")
    owner.take()
    runtime = make_runtime(theirs.detach(), folder / "rank_0.log", owner=owner, **how)
    published = []

    def publish():
        (folder / "new").write_text("new")
        try:
            runtime.disk.replace(folder / "new", folder / "published")
        except PermissionError:
            return False
        return True

    published.append(publish())
    runtime.slot.set(Cell.LEASE_NS, 1)
    published.append(publish())
    runtime.slot.set(Cell.LEASE_NS, 0)
    FolderOwner(folder, "b2").take()
    published.append(publish())
    me.say(published)
    mine.close()  # which ends this process


def _with_faults(runtime):
    run = SimpleNamespace(inject=("kill:step=9",), checkpoint_dir="checkpoints")
    spec = SimpleNamespace(injections_left={}, saver_trouble="", world_size=1)
    surround_rank(runtime, SimpleNamespace(run=run), spec)


@pytest.mark.parametrize("how", [{}, {"surround": _with_faults}], ids=["plain", "with --inject"])
def test_nothing_is_published_after_the_lease_or_in_anothers_folder(tmp_path, how):
    """Whether or not faults are injected into this run."""
    with ranks(_publish_when_forbidden, 1, tmp_path, how) as (rank,):
        assert rank.hear() == [True, False, False]


def _judge_faults(me, path):
    mine, theirs = Channel.pair()
    runtime = make_runtime(theirs.detach(), path)
    verdicts = []
    for dirty in (0, 1):
        runtime.slot.set(Cell.DIRTY, dirty)
        verdicts.append(
            {
                kind: runtime.survives(Fault(kind=kind, rank=0, step=1, cause="a cause"))
                for kind in (
                    FaultKind.COLLECTIVE_FAILED,
                    FaultKind.RANK_RAISED,
                    FaultKind.DEVICE_LOST,
                )
            }
        )
    me.keep_open = mine  # its end would be the end of this process
    return verdicts


def test_only_a_clean_rank_survives(tmp_path):
    """A lost peer or an exception leaves the state whole; the optimizer and a lost device do not."""
    ((clean, dirty),) = run_ranks(_judge_faults, 1, tmp_path / "rank_0.log")
    assert clean == {
        FaultKind.COLLECTIVE_FAILED: True,
        FaultKind.RANK_RAISED: True,
        FaultKind.DEVICE_LOST: False,
    }
    assert dirty == dict.fromkeys(clean, False)


ORDER = WriteCopy(rank=0, sealed=7, step=3, directory="c", keep_last=1, keep_every=0)


def _orders(me, runtime):
    me.say(runtime.order(ORDER).problem)


def _answer_late(me, path):
    channel, pid = _supervise(me, path, _orders)
    heard = [channel.receive()[0]]
    channel.send(CopyWritten(sealed=6, step=2))
    heard.append(channel.receive()[0])
    channel.send(CopyWritten(sealed=7, step=3, problem="gone"))
    return heard, exit_code_of(pid)


def test_a_rank_asks_again_until_its_order_is_answered(tmp_path):
    """Order or answer may be lost; an answer to another order is none."""
    with ranks(_answer_late, 1, tmp_path / "rank_0.log") as (rank,):
        assert rank.hear() == "gone"
        assert rank.result() == ([ORDER, ORDER], 5)


def _takes_over(me, runtime):
    runtime.next_generation(READY)
    me.say((runtime.take_owed(), runtime.take_owed()))


def _leave_an_order(me, path):
    channel, pid = _supervise(me, path, _takes_over)
    channel.receive()
    channel.send(ORDER)
    channel.send(form(1))
    return exit_code_of(pid)


def test_what_a_rank_before_has_ordered_is_taken_up_once(tmp_path):
    """It is there before the first generation is."""
    with ranks(_leave_an_order, 1, tmp_path / "rank_0.log") as (rank,):
        assert rank.hear() == (ORDER, None)
        assert rank.result() == 5
