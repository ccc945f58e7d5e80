"""The surroundings of a trainer without a supervisor: one generation, and no repair.

:class:`LocalRuntime` serves a single process and an outside launcher, which sets RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ddp_runner.core.modes import refuse_of_processes
from ddp_runner.core.plain_rank import PLAIN_RANK, plain_rank, restarts_of
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.group import Membership, has_programs_group
from ddp_runner.kernel.group.tcp_store import StoreLink
from ddp_runner.kernel.replica.loss import Loss
from ddp_runner.kernel.rules.classify import attribute
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import (
    EXIT_CODE_OF_STATUS,
    STATUS_OF_REASON,
    RunStatus,
    StopReason,
)
from ddp_runner.kernel.rules.faults import Fault, FaultError
from ddp_runner.kernel.rules.recovery import GiveUp, Incident
from ddp_runner.kernel.step.runtime import Generation, RankInfo, without_secrets_in
from ddp_runner.kernel.system.disk import Disk, RealDisk
from ddp_runner.kernel.system.run_files import not_written
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell, Slot
from ddp_runner.kernel.wire.events import Faulted, FaultTolerated, TuningChanged
from ddp_runner.kernel.wire.messages import (
    CopyWritten,
    Finished,
    Message,
    Metrics,
    Ready,
    WriteCopy,
    brief,
)
from ddp_runner.observe import format as fmt
from ddp_runner.observe.accounting import RunAccounting
from ddp_runner.observe.journal import MetricsFile
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.observe.summary import EndOfRun, RunFindings, write_summary
from ddp_runner.system.launch_folder import at_launch, begin_here

STORE_TIMEOUT_S = 60.0


class LocalRuntime:
    """One generation, no supervisor: a plain script, a notebook, or an outside launcher."""

    is_watched = False
    store_timeout_s = STORE_TIMEOUT_S
    may_find_store = True  # on the port where this rank would host one

    def __init__(
        self,
        *,
        rank_info: RankInfo,
        log_dir: Path,
        debug: bool,
        line: ProgressLine | None = None,
        records_as: str | None = None,
        uses_group: bool = False,
    ) -> None:
        """``line``: where a person sees how far it is; None for nowhere.

        ``uses_group``: the one that the program has formed.

        ``records_as``: rank 0 writes metrics.jsonl and summary.json for a run of that name; None: nobody does.
        """
        self.generation = 1 + restarts_of(os.environ)
        self._line = line
        self._uses_group = uses_group
        self._store: TCPStore | None = None  # that this rank hosts
        self._log_dir = log_dir
        # As which rank 0 records the training; None: nobody does.
        self._record_plan = (
            None
            if records_as is None
            else RecordPlan(folder=log_dir, name=records_as, began_s=time.monotonic())
        )
        self._record: PlainRecord | None = None
        self.rank_info = rank_info
        self.run_id = uuid.uuid4().hex[:12]
        self._memory = bytearray(SLOT_BYTES)
        self.slot = Board(memoryview(self._memory), 1).slot(0)
        self.disk: Disk = RealDisk()
        log_dir.mkdir(parents=True, exist_ok=True)
        self.logger = _logger(
            log_dir / f"rank_{rank_info.rank}.log", rank=rank_info.rank, debug=debug
        )
        self._formed = False
        # What there is to say of settings that the task does not read.
        self.unread: Callable[..., tuple[str, ...]] = lambda **_: ()
        self.lines: tuple[str, ...] = ()  # what there is to say of the program's own objects

    def next_generation(self, ready: Ready) -> Generation:
        """The one generation there is; what is resumed goes on as the run that it was."""
        self.run_id = ready.run_id or self.run_id
        for note in (*(ready.block or (f"computing in {ready.precision}",)), *ready.notes):
            self.logger.info(note)
        for line in self.lines:
            self.logger.info(line)
            if self._line is not None:
                self._line.say(line)
        for warning in self.unread(is_given_all=ready.is_given_all):
            self.logger.warning(warning)
            if self._line is not None:
                self._line.say(f"WARNING: {warning}")
        if self._line is not None and ready.is_complete:
            self._line.say(
                f"already complete: {ready.total_steps:,} steps, nothing to train; another name, or"
                " resume='none', starts fresh"
            )
        if self._formed:
            raise RuntimeError("without a supervisor a broken generation is not formed again")
        self._formed = True
        if self._record_plan is not None and self.rank_info.rank == 0 and not ready.is_complete:
            self._record = PlainRecord(
                self._record_plan,
                run_id=self.run_id,
                world_size=self.rank_info.world_size,
                steps_per_epoch=ready.steps_per_epoch,
                slot=self.slot,
                warn=self.logger.warning,
            )
        alone = self.rank_info.world_size == 1
        membership = Membership(
            generation=self.generation,
            rank=self.rank_info.rank,
            world_size=self.rank_info.world_size,
            local_rank=self.rank_info.local_rank,
            local_world_size=self.rank_info.local_world_size,
            is_programs=self._uses_group,
        )
        needs_none = alone or self._uses_group
        link = (
            StoreLink("127.0.0.1", 0, timeout_s=STORE_TIMEOUT_S)
            if needs_none
            else self.store_link()
        )
        return Generation(membership=membership, link=link, switch=AbortSwitch())

    def store_link(self) -> StoreLink:
        """The launcher's store; without one (srun, mp.spawn), rank 0 hosts it on the port that is named.

        Raises BadInputError where none is named, or rank 0 cannot host it there.
        """
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except (KeyError, ValueError):
            raise BadInputError(
                "MASTER_ADDR, MASTER_PORT", "", "must name the store, with more than one rank"
            ) from None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and self.rank_info.rank == 0:
            try:
                self._store = TCPStore(
                    host,
                    port,
                    world_size=None,
                    is_master=True,
                    timeout=timedelta(seconds=STORE_TIMEOUT_S),
                    wait_for_workers=False,
                )
            except RuntimeError as error:  # the port is taken: perhaps by a store of the program's
                if not self.may_find_store:
                    why = str(error).partition("\n")[0]
                    expected = f"name this machine and a free port: no store at {host} ({why})"
                    raise BadInputError("MASTER_PORT", port, expected) from error
        return StoreLink(host, port, timeout_s=self.store_timeout_s)

    def report(self, message: Message) -> None:
        """Nobody listens; files and the log have what matters, and a person may see how far it is."""
        shown = without_secrets_in(message, self.logger.hidden)
        self.logger.debug(f"reported: {brief(shown)}")
        self._log_failed_save(shown)
        if self._record is not None:
            self._record.take(shown)
        if self._line is not None and isinstance(message, Metrics):
            self._line.show(message.step, self.slot.get(Cell.TOTAL_STEPS), message.values)
        elif self._line is not None and isinstance(message, (Finished, Faulted)):
            self._line.finish()
        elif self._line is not None and isinstance(message, TuningChanged) and message.action:
            self._line.say(message.action)

    def _log_failed_save(self, message: Message) -> None:
        if isinstance(message, FaultTolerated) and message.line:
            self.logger.warning(message.line, step=message.fault.step)

    def ended(self, error: BaseException) -> None:
        """The training ends with ``error``."""
        if self._record is not None:
            self._record.ended(error)

    def stop_asked(self) -> StopReason | None:
        """Never: Ctrl-C raises KeyboardInterrupt in a plain script."""
        return None

    def save_asked(self) -> bool:
        """Never."""
        return False

    def order(self, order: WriteCopy) -> CopyWritten:
        """Nobody else is there."""
        raise AssertionError(f"this process writes the file of step {order.step} itself")

    def take_owed(self) -> WriteCopy | None:
        """There was none."""
        return None

    def survives(self, fault: Fault) -> bool:
        """Never: there is nobody to form the next generation."""
        raise FaultError(fault)

    def training_loss(self, loss: Loss) -> Loss:
        """Nothing is injected."""
        return loss


def _logger(path: Path, *, rank: int, debug: bool) -> DDPLogger:
    """A rank's log, or standard error where that cannot be written: no log is worth a run."""
    try:
        return DDPLogger(rank=rank, path=path, debug=debug)
    except OSError as error:
        logger = DDPLogger(rank=rank, debug=debug)
        logger.warning(not_written(path, error))
        return logger


def local_runtime(settings: Settings, rank: int, world_size: int) -> LocalRuntime:
    """The surroundings of a trainer that a script or a notebook has made."""
    begin_here()
    uses_group = has_programs_group()
    if uses_group:
        rank, world_size = _of_group(rank, world_size)
    elif world_size == 1 and (of_launcher := plain_rank(os.environ)):
        # Alone each would train the same, over the others' files.
        rank, world_size = of_launcher.rank, of_launcher.world_size
    refuse_of_processes(settings, world_size=world_size)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    rank_info = RankInfo(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        device=_local_device(settings, local_rank),
        loads=True,
    )
    if not settings.run.debug:
        quiet_torch()
    shows = rank == 0 and settings.log.display != "none"
    return LocalRuntime(
        rank_info=rank_info,
        log_dir=at_launch(settings.run.log_dir),
        debug=settings.run.debug,
        line=ProgressLine() if shows else None,
        records_as=settings.run.name,
        uses_group=uses_group,
    )


def _of_group(rank: int, world_size: int) -> tuple[int, int]:
    """Rank and number in the group that the program has formed. Raises BadInputError for others."""
    mine = dist.get_rank(), dist.get_world_size()
    if os.environ.get(PLAIN_RANK) == "0":
        expected = (
            "each process trains alone, but init_process_group has formed a group: leave one out"
        )
        raise BadInputError(PLAIN_RANK, 0, expected)
    if (rank, world_size) not in ((0, 1), mine):
        expected = f"init_process_group has made this rank {mine[0]} of {mine[1]}: leave them out"
        raise BadInputError("rank, world_size", f"{rank}, {world_size}", expected)
    return mine


def visible_gpu(local_rank: int, visible: int) -> str:
    """The GPU of a rank that an outside launcher has started, of the ``visible`` ones.

    Where each rank is shown its own GPU alone (``srun --gpus-per-task=1``), that is number 0 for all.
    """
    return f"cuda:{local_rank % visible if visible else local_rank}"


def _local_device(settings: Settings, local_rank: int) -> str:
    if settings.run.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    gpus = settings.run.gpus
    if gpus:
        return f"cuda:{gpus[local_rank % len(gpus)]}"
    return visible_gpu(local_rank, torch.cuda.device_count())


# The line that shows how far a training is that nobody supervises: a script's, or a notebook's.

_REDRAWN_EVERY_S = 0.2
_LINE_EVERY_S = 5.0  # where lines cannot be redrawn


class Aside(LocalRuntime):
    """Surroundings that nobody hears or sees: a board and a disk of its own."""

    def __init__(self, rank_info: RankInfo, logger: DDPLogger) -> None:  # writes no files of a run
        self.rank_info = rank_info
        self.run_id = ""
        self._memory = bytearray(SLOT_BYTES)
        self.slot = Board(memoryview(self._memory), 1).slot(0)
        self.disk = RealDisk()
        self.logger = logger
        self._line = None
        self._formed = False

    def report(self, message: Message) -> None:
        """Discard the message."""


class ProgressLine:
    """Redrawn in place on a terminal and in a notebook, else a line every few seconds."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._shown_at_s = float("-inf")
        self._shown_step = -1
        self._newest = (0, "")
        self._width = 0

    def show(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """Show the figures of ``step``, unless the ones before have just been shown."""
        if "loss" not in values:
            return
        parts = [f"step {fmt.count(step)}/{fmt.count(total)}", f"loss {fmt.figure(values['loss'])}"]
        rate = values.get("samples_per_s", 0.0)
        if rate > 0.0:
            parts.append(f"{fmt.rate(rate)} samples/s")
        if step_s := values.get("step_s", 0.0):
            parts.append(f"eta {fmt.duration(max(0, total - step) * step_s)}")
        self._newest = (step, "  ".join(parts))
        every_s = _REDRAWN_EVERY_S if _can_redraw() else _LINE_EVERY_S
        if self._now_s() - self._shown_at_s >= every_s:
            self._draw()

    def say(self, text: str) -> None:
        """A line of its own."""
        self.finish()
        _write(f"{text}\n")

    def finish(self) -> None:
        """Show the last figures, and leave the line."""
        if self._newest[0] > 0 and self._newest[0] != self._shown_step:
            self._draw()
        if self._width:
            _write("\n")
        self._width = 0

    def _draw(self) -> None:
        self._shown_at_s = self._now_s()
        self._shown_step, text = self._newest
        if _can_redraw():
            _write(f"\r{text:<{self._width}}")
            self._width = max(self._width, len(text))
        else:
            _write(f"{text}\n")


def _can_redraw() -> bool:
    """Return True if the reader handles a carriage return: a terminal, or a notebook's output."""
    if "ipykernel" in sys.modules:
        return True
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):
        return False


def _write(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # nobody reads
        sys.stdout.write(text)
        sys.stdout.flush()


# Keeps torch's advice about settings that are this runner's own choice off a program's output.

_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_ERROR = 2  # of torch's C++ log: information, warning, error


def quiet_torch() -> None:
    """Let torch's C++ part log errors only, unless the user has set its level.

    Ranks of a supervisor have the variable in their environment; it is read when torch is imported,
    which is long past where a trainer is made by hand.
    """
    if _VARIABLE in os.environ:
        return
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    with contextlib.suppress(OSError, ValueError):  # another build of torch: it says what it says
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
        level.value = max(level.value, _ERROR)


# The files of a training that nobody supervises. They stop no training and decide nothing.

SUMMARY = "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlan:
    """Where the files of a training go, and of which run; ``began_s``: monotonic."""

    folder: Path
    name: str
    began_s: float


class PlainRecord:
    """Owned by rank 0's :class:`LocalRuntime`, which hands it each message.

    What it cannot write is a warning: no file is worth a training.
    """

    def __init__(
        self,
        plan: RecordPlan,
        *,
        run_id: str,
        world_size: int,
        steps_per_epoch: int,
        slot: Slot,
        warn: Callable[[str], None],
    ) -> None:
        self._path = plan.folder / SUMMARY
        self._metrics = MetricsFile(plan.folder / "metrics.jsonl", warn=warn)
        self._world_size = world_size
        self._slot = slot
        self._warn = warn
        self._findings = RunFindings(run_id=run_id, name=plan.name)
        self._accounting = RunAccounting(began_s=plan.began_s)
        self._steps_per_epoch = steps_per_epoch
        self._fault: Fault | None = None
        self._is_written = False

    def take(self, message: Message) -> None:
        """Record a report of this rank."""
        match message:
            case Metrics(step=step, rank=rank, values=values):
                self._metrics.write(step, rank, values)
            case events.RankFormed(generation=generation, committed_step=step):
                self._record(events.WorldFormed(generation=generation, step=step))
            case events.Faulted(fault=fault):
                self._fault = fault
            case events.Report():
                self._record(message.in_generation(1))
            case Finished():
                self._write(STATUS_OF_REASON[message.reason], finished=message)
            case _:
                pass

    def ended(self, error: BaseException) -> None:
        """Training has ended with ``error``, which is passed on."""
        if not self._is_written:
            is_wanted = isinstance(error, KeyboardInterrupt)
            self._write(RunStatus.INTERRUPTED if is_wanted else RunStatus.FAILED)

    def _record(self, event: events.Event) -> None:
        self._findings.take(event)
        self._accounting.take(event, now_s=time.monotonic())

    def _write(self, status: RunStatus, finished: Finished | None = None) -> None:
        self._is_written = True
        self._metrics.close()
        first_ns = self._slot.get(Cell.FIRST_STEP_NS)
        self._accounting.first_step_s = first_ns / 1e9 if first_ns else None
        now_s = time.monotonic()
        if self._fault is not None:
            self._accounting.incident(_ended_by(self._fault, now_s), event_id=-1)
        steps, own_ns = self._slot.get(Cell.OWN_STEPS), self._slot.get(Cell.OWN_NS)
        end = EndOfRun(
            status=status,
            exit_code=EXIT_CODE_OF_STATUS[status],
            reading=self._slot.read(),
            finished=[] if finished is None else [finished],
            now_s=now_s,
        )
        summary = self._accounting.summary(
            end,
            facts=self._findings,
            world_size=self._world_size,
            steps_per_epoch=self._steps_per_epoch,
            own_step_s={0: own_ns / 1e9 / steps if steps else None},
        )
        try:
            write_summary(self._path, summary)
        except OSError as error:
            self._warn(f"{self._path} could not be written: {error.strerror or error}")


def _ended_by(fault: Fault, now_s: float) -> events.Plan:
    """The fault that has ended the training, as the account of a run takes one in."""
    incident = Incident(
        attribution=attribute([fault]), at_s=now_s, committed_step=fault.step, ever_formed=True
    )
    return events.Plan(
        plan=GiveUp.__name__,
        culprit=fault.rank,
        kind=fault.kind.value,
        replaced=(),
        dropped=(),
        kept=None,
        all_ranks_dead=False,
        victims=(),
        incident=incident,
        began_s=fault.at_ns / 1e9,
        generation=1,
        since_s=fault.at_ns / 1e9,
        detect_s=None,
        action="none: nobody supervises this training",
    )
