"""Is a rank whose program is a script: speaks to the supervisor on its behalf, and has it run as python would."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_runner.features.script.attempt_files import error_file
from ddp_runner.features.script.rules import ScriptCall
from ddp_runner.kernel.rank.runtime import (
    StartupOutput,
    flush_output,
    lossy_text,
    write_stacks,
)
from ddp_runner.kernel.rank.signals import RUN_SIGNALS
from ddp_runner.kernel.rank.zygote import Ahead
from ddp_runner.kernel.rules.faults import CAUSE_CHARACTERS_MAX
from ddp_runner.kernel.rules.helper_roles import STORE
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.failure import fault_of
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.system.interfaces import interface_of, interface_to
from ddp_runner.kernel.system.run_files import left_over, temporary_path, writer_of
from ddp_runner.kernel.wire.board import Board, Cell, Slot
from ddp_runner.kernel.wire.events import Faulted, LogOutage, RankFormed
from ddp_runner.kernel.wire.fork_specs import ProgramSpec
from ddp_runner.kernel.wire.messages import (
    CollectivesBegun,
    CountCollectives,
    Fork,
    Form,
    Leaving,
    Message,
    Ready,
    ReopenLog,
    Stacks,
)
from ddp_runner.kernel.wire.packets import built
from ddp_runner.observe.files import ends_torn
from ddp_runner.observe.logger import HELD_BACK, format_record
from ddp_runner.rank.main_program import run_as_main
from ddp_runner.start import write_stacks_when_asked
from ddp_runner.system.heartbeat import count_heartbeats

_IMPORTED_AHEAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.optim",
    "torch.utils.data",
    STORE.module,
)
_THREADS = "OMP_NUM_THREADS"
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # which programs of others expect to end of


def ahead(modules: str) -> Ahead:
    """Return what is imported before ranks of a script, and the user's ``modules``, parted by commas."""
    return Ahead(ours=_IMPORTED_AHEAD, theirs=tuple(filter(None, modules.split(","))))


def run(request: Fork, descriptors: list[int]) -> int:
    """Be rank ``request.rank`` of a script; to be called at the bottom of the stack, once a process.

    ``descriptors``: control channel, board, output, and standard input where it is this rank's. What the script
    raises leaves it as it is: SystemExit, or an exception whose traceback has been shown without our frames (then 1 is returned).
    """
    control, board, output, *stdin = descriptors
    spec = request.spec
    assert isinstance(spec, ProgramSpec)
    call: ScriptCall = built(ScriptCall, spec.call)
    parent_death.set_process_name(f"ddp:rank{request.rank}")
    parent_death.mark_own_children()
    log = Path(spec.log_file)
    startup = StartupOutput(output, log)
    _be_an_ordinary_process(*stdin)
    link = _Link(
        Channel.from_descriptor(control),
        _slot_of(board, request.rank, spec.world_size),
        startup,
        request.rank,
        log=log,
        seal=spec.log_seal,
    )
    form = link.join()
    os.environ.update(torchrun_environment(form, spec, call))
    if form.world_size > form.local_world_size:
        _lead_gloo(spec)
    if call.is_program:
        _become_program(call.path, call.arguments)
    register_optimizer_step_post_hook(_StepCounter(link.slot))
    count_heartbeats(link.slot)
    notice_files(link.slot, whole_saves=not call.plain_saves)
    try:
        path = call.path and str(Path(call.path).absolute())
        code = run_as_main(path, call.module, list(call.arguments), on_error=link.failed)
    except SystemExit as error:
        link.leaving(error.code)
        raise
    if code == 0:
        link.leaving(0)
    return code


def torchrun_environment(form: Form, spec: ProgramSpec, call: ScriptCall) -> dict[str, str]:
    """Return the variables that torchrun 2.13 sets for each rank. All machines have as many ranks.

    Source: torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    rank, world_size = str(form.rank), str(form.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(form.local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(form.local_world_size),
        "GROUP_RANK": str(form.rank // form.local_world_size),
        "GROUP_WORLD_SIZE": str(form.world_size // form.local_world_size),
        "ROLE_NAME": call.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": spec.store_host,
        "MASTER_PORT": str(spec.store_port),
        "TORCHELASTIC_RUN_ID": call.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(call.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(call.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file(Path(spec.log_file))),
    }


def _lead_gloo(spec: ProgramSpec) -> None:
    """Have gloo use the interface that leads to the coordinator: it takes what this host's name means, often loopback."""
    if interface := interface_of(spec.local_addr) or interface_to(spec.store_host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _be_an_ordinary_process(stdin: int | None = None) -> None:
    """Leave nothing of the zygote's: its handlers, its streams, and what a fork has in common with others."""
    for number in (*RUN_SIGNALS, signal.SIGPIPE):
        usual = signal.SIG_IGN if number == signal.SIGPIPE else signal.SIG_DFL
        signal.signal(number, usual)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = lossy_text(1), lossy_text(2)
    read = os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin
    os.dup2(read, 0)
    os.close(read)
    write_stacks_when_asked()
    # All forks would draw the same numbers; Python's own generator does this itself, and CUDA's begin later.
    np.random.seed()  # noqa: NPY002
    torch.default_generator.seed()


def _become_program(path: str, arguments: Sequence[str]) -> NoReturn:
    """Run another program in this process; of ours nothing is left but its environment and output."""
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            if int(descriptor.name) > 2:
                os.set_inheritable(int(descriptor.name), False)
    os.execvp(path, [path, *arguments])  # noqa: S606 - the user's program


def _slot_of(descriptor: int, rank: int, world_size: int) -> Slot:
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    return Board(memoryview(memory), world_size).slot(rank)


class _Link:
    """Reports to the supervisor, and hears what that asks. One daemon thread receives."""

    def __init__(
        self,
        channel: Channel,
        slot: Slot,
        output: StartupOutput,
        rank: int,
        *,
        log: Path,
        seal: str,
    ) -> None:
        self._channel = channel
        self.slot = slot
        self._output = output
        self._rank = rank
        self._log = log
        self._seal = seal
        self._forms: queue.SimpleQueue[Form] = queue.SimpleQueue()
        self._generation = 0

    def join(self) -> Form:
        """Say that this rank is there, and wait until all are, and which of them this is: then the log file is open."""
        self.slot.clear()
        self.slot.set_loss(float("nan"))  # nobody reports it
        self.slot.stamp(Phase.STARTUP, time.monotonic_ns())
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        self._send(
            Ready(
                rank=self._rank,
                committed_step=0,
                run_id="",
                total_steps=0,
                steps_per_epoch=0,
                train_samples=0,
                parameters=0,
                device="",
                ends_in_silence=True,  # it leaves no generation: where its machine is cut off, it ends
            )
        )
        form = self._forms.get()
        self._generation = form.generation
        with contextlib.suppress(OSError):  # no log is worth a run
            self._log.parent.mkdir(parents=True, exist_ok=True)
            error_file(self._log).unlink(missing_ok=True)
        if line := self._output.attach():
            self._send(LogOutage(rank=self._rank, text=line))
        self._send(
            RankFormed(
                rank=self._rank,
                generation=form.generation,
                committed_step=0,
                source=self._rank,
                group_s=0.0,
                transfer_s=0.0,
                rebuild_s=0.0,
            )
        )
        return form

    def failed(self, error: BaseException) -> None:
        """Say why this rank ends; its exit code is heard of anyway."""
        reading = self.slot.read()
        fault = fault_of(
            error,
            rank=self._rank,
            step=reading.committed_step,
            phase="",
            aborted=False,
        )
        self._send(Faulted(generation=self._generation, fault=fault))
        # INVARIANT one-traceback: what stands behind the record HELD_BACK is for the log, not for the console.
        # Broken if: the traceback is printed before that record.
        # Guarded by: test_one_traceback_is_shown_and_that_of_the_first.
        flush_output()
        now = datetime.now(timezone.utc).astimezone()
        last = format_record(
            "DEBUG", HELD_BACK, rank=self._rank, step=None, at=now, seal=self._seal
        )
        with contextlib.suppress(OSError):
            os.write(2, (b"\n" if ends_torn(self._log) else b"") + last.encode())

    def leaving(self, code: object) -> None:
        """Say with what the program has ended, as by ``sys.exit(code)``: a peer may fail of that before this process ends.

        A program that goes on in other threads has not ended.
        """
        number = code if isinstance(code, int) else int(code is not None)
        others = set(threading.enumerate()) - {threading.main_thread()}
        if not number and not all(thread.daemon for thread in others):
            return
        words = "" if number is code or code is None else str(code).strip()
        self._send(
            Leaving(
                rank=self._rank,
                exit_code=number & 0xFF,
                at_ns=time.monotonic_ns(),
                words=" ".join(words[:CAUSE_CHARACTERS_MAX].split()),
            )
        )

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ChannelClosedError:
            os._exit(1)

    def _listen(self) -> None:
        """Thread: act on what the supervisor says. Its end is this rank's end."""
        try:
            while True:
                message, _ = self._channel.receive()
                self._act(message)
        except ChannelClosedError:
            pass
        except BaseException:  # noqa: BLE001 - top of a thread: a deaf rank must not live on
            traceback.print_exc()
        finally:
            os._exit(1)

    def _act(self, message: Message) -> None:
        match message:
            case Form():
                self._forms.put(message)
            case ReopenLog():
                self._output.reopen()
            case Stacks():
                write_stacks()
                self._count_collectives()
            case CountCollectives():
                self._count_collectives()
            case _:
                raise TypeError(f"a script's rank does not take {type(message).__name__}")

    def _count_collectives(self) -> None:
        step = self.slot.get(Cell.COMMITTED_STEP)
        in_all, in_others = collectives_by_groups()
        answer = CollectivesBegun(rank=self._rank, step=step, count=in_all, in_others=in_others)
        self._send(answer)


class _StepCounter:
    """A hook of torch's: counts optimizer steps on the board. A script with several optimizers counts one."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._steps: dict[int, int] = {}
        self._threads = os.environ.get(_THREADS, ""), torch.get_num_threads()

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        if not self._steps:
            self._take_threads()
        hold_groups()
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        slot, now_ns = self._slot, time.monotonic_ns()
        slot.stamp(Phase.FORWARD, now_ns)
        if steps <= slot.get(Cell.COMMITTED_STEP):
            return
        before_ns = slot.get(Cell.LAST_COMMIT_NS)
        if before_ns:
            slot.set(Cell.STEP_NS, now_ns - before_ns)
        else:
            slot.set(Cell.FIRST_STEP_NS, now_ns)
        slot.set(Cell.STEP, steps)
        slot.set(Cell.LAST_COMMIT_NS, now_ns)
        slot.set(Cell.COMMITTED_STEP, steps)

    def _take_threads(self) -> None:
        """Use as many threads as the script has put into its environment, which torch reads when it is imported."""
        given, threads = self._threads
        wanted = os.environ.get(_THREADS, "")
        is_left = torch.get_num_threads() == threads  # else the script has set it itself
        if wanted not in (given, str(threads)) and re.fullmatch("[1-9][0-9]*", wanted) and is_left:
            torch.set_num_threads(int(wanted))
            sys.stderr.write(
                f"ddp_runner: {_THREADS}={wanted}, set by the script, holds after its first optimizer step; "
                "set it before run, or call torch.set_num_threads()\n"
            )


def notice_files(slot: Slot, *, whole_saves: bool) -> None:
    """Count on the board what the script saves and reads with torch, at whatever name it is called by.

    With ``whole_saves`` a save to a file is written beside it, synced and then renamed: a rank that is
    killed while it saves leaves the file that was there.
    """
    save, load = torch.save, torch.load

    @functools.wraps(save)
    def saving(obj: object, f: Any, *args: Any, **named: Any) -> None:
        if isinstance(f, (str, bytes, os.PathLike)):
            f = os.fsdecode(f)  # torch takes no path in bytes
        if whole_saves and isinstance(f, str) and (os.path.isfile(f) or not os.path.exists(f)):  # noqa: PTH110, PTH113
            _save_whole(lambda path: save(obj, path, *args, **named), Path(f))
        else:  # of a device or a pipe the reader is to get it
            save(obj, f, *args, **named)
        slot.add(Cell.SCRIPT_SAVES, 1)

    @functools.wraps(load)
    def loading(*args: Any, **named: Any) -> Any:
        loaded = load(*args, **named)
        slot.add(Cell.SCRIPT_LOADS, 1)
        return loaded

    torch.save, torch.load = saving, loading


def _save_whole(save: Callable[[Path], None], path: Path) -> None:
    """Have ``save`` write beside ``path``, and put that in its place once it is on disk.

    What ``path`` leads to by a link is replaced, and not the link.
    """
    path = Path(os.path.realpath(path))
    for left in left_over(path.parent)[0]:  # of this process: another thread's, which writes it
        writer = writer_of(left.name)
        is_of_this_file = left.name.startswith(f".{path.name}.tmp-")
        if is_of_this_file and writer is not None and writer.pid != os.getpid():
            left.unlink(missing_ok=True)
    beside = temporary_path(path)
    try:
        save(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


# The process groups of a script: how many collectives it has begun in them, and that none is
# destroyed too early.

_held: dict[int, dist.ProcessGroup] = {}  # by id; also those that the script has destroyed


def hold_groups() -> None:
    """Keep the groups that there are now until this process ends. Called at each optimizer step.

    INVARIANT groups-held: no group is destroyed while a script still runs. A replica whose script has called
    ``destroy_process_group()`` is its last owner, and torch 2.13 joins gloo's threads in the replica's end with the
    interpreter's lock held, while one of them may be waiting for that lock, for ever.
    Broken if: a group that a replica holds is held by nobody else.
    Guarded by: test_a_script_that_destroys_its_group_under_a_replica_ends.
    """
    groups = dist.distributed_c10d._world.pg_map if dist.is_available() else {}  # noqa: SLF001 - there is no public list
    for group in groups:
        _held.setdefault(id(group), group)


def collectives_by_groups() -> tuple[int, int]:
    """Return how many collectives this process has begun: in groups of all ranks, and in all others. For any thread.

    Returns (-1, 0) outside of any group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return -1, 0
    in_all = in_others = 0
    with contextlib.suppress(ValueError, RuntimeError):  # the main thread has just left them
        world_size = dist.get_world_size()
        for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001 - as above
            try:
                count: Callable[[], int] = group._get_sequence_number_for_group  # type: ignore[attr-defined] # noqa: SLF001 - nor count, and no stub
                begun = count()
            except RuntimeError:  # of a backend that does not count
                continue
            if group.size() == world_size:
                in_all += begun
            else:
                in_others += begun
    return in_all, in_others
