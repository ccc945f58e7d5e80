"""A rank under somebody else's launcher: torchrun, srun, a Kubernetes PyTorchJob.

The same trainer, with in-process repairs only. What needs a new process ends with an exit code that
makes the launcher restart, and the restarted ranks resume from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import torch

from ddp_runner.config.relations import check_relations
from ddp_runner.config.usual import unread_warning
from ddp_runner.core.launch_plan import LaunchPlan, time_limit
from ddp_runner.core.plain_rank import PlainRank
from ddp_runner.core.settings import Settings
from ddp_runner.features.launchers.restart_log import RestartLog, read_restart_log, restart_log_path
from ddp_runner.features.launchers.restarts import SPENT, replay
from ddp_runner.kernel.group.group import holds_communicators
from ddp_runner.kernel.rank.exit_functions import run_exit_functions
from ddp_runner.kernel.rank.signals import take_signals
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import (
    EXIT_CODE_OF_STATUS,
    STATUS_OF_REASON,
    ExitCode,
    RunStatus,
    StopReason,
)
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from ddp_runner.kernel.step.runtime import Generation, RankInfo, without_secrets_in
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import CheckpointSaved, Faulted, RankFormed, TuningChanged
from ddp_runner.kernel.wire.messages import Message, Metrics, Ready, RestartProgress, brief
from ddp_runner.observe.format import printable
from ddp_runner.observe.journal import MetricsFile
from ddp_runner.observe.logger import install_root_handler
from ddp_runner.observe.summary import EndOfRun, read_summary, write_summary
from ddp_runner.system.launch_folder import at_launch, begin_here
from ddp_runner.system.run_directories import RunDirectories
from ddp_runner.training.figures.train_report import TrainReport, finished_message
from ddp_runner.training.local_runtime import STORE_TIMEOUT_S, LocalRuntime, visible_gpu
from ddp_runner.training.trainer import DDPTrainer

_STOP_SIGNALS = {
    signal.SIGTERM: StopReason.PREEMPTED,
    signal.SIGUSR1: StopReason.PREEMPTED,
    signal.SIGHUP: StopReason.PREEMPTED,
    signal.SIGINT: StopReason.INTERRUPTED,
}
_SAVE_SIGNAL = signal.SIGUSR2


_PROGRESS_EVERY_S = 5.0  # a rank that is killed loses at most so much of the account of its time
_PREDECESSOR_ENDS_S = 5.0  # the ranks that this one replaces, with their loader workers
_FORMS_S = 3.0  # from a signal to the first group: then this process ends
NO_ORIGINS: Mapping[str, str] = MappingProxyType({})  # nobody has chosen a setting


class _EndsUnformed:
    """Ends this process if it gets a signal and then forms no group: there is nothing to save.

    It may wait within torch for a rank that has ended, for instance for bad input. Python's signal handlers, which only the main
    thread runs, are not called there, and the launcher would send SIGKILL half a minute later.
    """

    def __init__(self) -> None:
        self._signals, self._ours = socket.socketpair()
        for one in (self._signals, self._ours):
            one.setblocking(one is self._signals)
        self._is_over = threading.Event()
        self._before = -1
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._ours.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def formed(self) -> None:
        """Leave signals to their handlers from now on. Called in the main thread."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before)
        self._ours.close()  # which ends the thread

    def _wait(self) -> None:
        with self._signals:
            while numbers := self._signals.recv(16):
                reasons = [reason for number, reason in _STOP_SIGNALS.items() if number in numbers]
                if reasons and not self._is_over.wait(_FORMS_S):
                    os._exit(EXIT_CODE_OF_STATUS[STATUS_OF_REASON[reasons[0]]])


class OutsideRuntime(LocalRuntime):
    """One generation per restart of the launcher; signals ask for a stop or a save after the step."""

    may_find_store = False  # it would be another job's

    def __init__(
        self, *, rank_info: RankInfo, settings: Settings, origins: Mapping[str, str] = NO_ORIGINS
    ) -> None:
        """``origins``: where each setting came from, by dotted key."""
        log_dir = at_launch(settings.run.log_dir)
        super().__init__(rank_info=rank_info, log_dir=log_dir, debug=settings.run.debug)
        # The others wait there while rank 0 makes its last save, at last elsewhere.
        self.store_timeout_s = STORE_TIMEOUT_S + settings.recovery.checkpoint_timeout_s
        restarts = self.generation - 1
        self._restart_log = RestartLog(
            log_dir, rank=rank_info.rank, is_restart=restarts > 0, warn=self.logger.warning
        )
        self.rank_info = replace(rank_info, learnt=self._restart_log.learnt)
        # RestartLog once the ranks have agreed: rank 0 says which run it is.
        self.run_id = self._restart_log.run_id or self.run_id
        self._began_ns, self._formed_ns, self._progress_at_ns = time.monotonic_ns(), 0, 0
        self._clock = _boot()
        self._notes = check_relations(settings)  # nobody else shows them here
        self._settings, self._origins = settings, origins
        self._is_quiet = settings.log.console == "quiet"
        self._stop: StopReason | None = None
        limit = time_limit(
            max_time_s=settings.run.max_time,
            job_end=os.environ.get("SLURM_JOB_END_TIME", ""),
            now_utc_s=time.time(),
            stop_timeout_s=settings.recovery.stop_timeout_s,
        )
        self._stop_at_s = math.inf if limit is None else time.monotonic() + limit.seconds
        self._save_is_asked = False
        self.directories: RunDirectories | None = None  # where this rank has taken hold of them
        is_first = rank_info.rank == 0
        self._metrics = MetricsFile(log_dir / "metrics.jsonl") if is_first else None
        numbers = [*_STOP_SIGNALS, _SAVE_SIGNAL]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            numbers.remove(signal.SIGHUP)
        take_signals(numbers, self._on_signal)
        self._unformed = _EndsUnformed()
        self._restart_log.keep(self.restart_progress(step=-1))

    def next_generation(self, ready: Ready) -> Generation:
        """The one generation of this restart; rank 0 prints what there is to say before."""
        ready = replace(ready, notes=(*self._notes, *ready.notes))
        if self.rank_info.rank == 0:
            lines = () if self._is_quiet else (*ready.block, *ready.notes)
            found = unread_warning(self._settings, self._origins, is_given_all=ready.is_given_all)
            warnings = (f"warning: {line}" for line in found)
            print(*lines, *warnings, sep="\n", end="\n" * bool(lines or found), flush=True)
        return super().next_generation(ready)

    def report(self, message: Message) -> None:
        """Keep what the next restart must know; rank 0 keeps metrics.jsonl and prints a line a step."""
        message = without_secrets_in(message, self.logger.hidden)
        self.logger.debug(f"reported: {brief(message)}")
        self._log_failed_save(message)
        self._look_after_folders(message)
        self._keep_time(message)
        self._restart_log.keep(message)
        if isinstance(message, TuningChanged) and self.rank_info.rank == 0 and message.action:
            print(message.action, flush=True)
        if isinstance(message, Metrics) and self._metrics is not None:
            self._metrics.write(message.step, message.rank, message.values)
            if self._is_quiet:
                return
            shown = (f"{name} {message.values[name]:.4g}" for name in sorted(message.values))
            sys.stdout.write(f"step {message.step}  {'  '.join(shown)}\n")
            sys.stdout.flush()

    def _look_after_folders(self, message: Message) -> None:
        """Have those that somebody removed made again; rank 0 holds their locks."""
        if self.directories is not None and isinstance(message, (Metrics, CheckpointSaved)):
            for change in self.directories.look():
                self.logger.warning(change.text)
                if change.is_new and change.option == "--checkpoint-dir":
                    self._save_is_asked = True

    def _keep_time(self, message: Message) -> None:
        """Write down where the time went, at what a later restart may go on from, and now and then."""
        match message:
            case RankFormed(committed_step=step):
                self._unformed.formed()
                self._formed_ns = time.monotonic_ns()
                self._restart_log.keep(self.restart_progress(step=step))
            case _ if self.rank_info.rank:
                pass  # the run's time is that of its rank 0
            case CheckpointSaved(step=step):
                self._restart_log.keep(self.restart_progress(step=step))
            case Faulted():
                self._restart_log.keep(self.restart_progress())
            case Metrics() if time.monotonic_ns() - self._progress_at_ns > _PROGRESS_EVERY_S * 1e9:
                self._restart_log.keep(self.restart_progress())
            case _:
                pass

    def restart_progress(self, *, step: int | None = None) -> RestartProgress:
        """Return this process's progress and the shares of its time; ``step``: report that one, not the newest."""
        self._progress_at_ns = time.monotonic_ns()
        reading = self.slot.read()
        return RestartProgress(
            rank=self.rank_info.rank,
            generation=self.generation,
            run_id=self.run_id,
            clock=self._clock,
            began_ns=self._began_ns,
            at_ns=self._progress_at_ns,
            step=reading.committed_step if step is None else step,
            formed_ns=self._formed_ns,
            first_step_ns=self.slot.get(Cell.FIRST_STEP_NS),
            spent_ns={name: getattr(reading, f"{name}_ns") for name in SPENT},
        )

    def resume_word(self, asked: str) -> str:
        """Return what this process resumes: the user's choice, until this launch has saved something."""
        return "auto" if self._restart_log.has_saved else asked

    def stop_asked(self) -> StopReason | None:
        """Return the stop that a signal or the launch's time limit asks for."""
        if self._stop is None and time.monotonic() >= self._stop_at_s:
            self._stop = StopReason.PREEMPTED
        return self._stop

    def save_asked(self) -> bool:
        """Return whether a signal has asked for a checkpoint since the last call."""
        if not self._save_is_asked:
            return False
        self._save_is_asked = False
        return True

    def _on_signal(self, number: signal.Signals) -> None:
        if number == _SAVE_SIGNAL:
            self._save_is_asked = True
        else:
            self._stop = self._stop or _STOP_SIGNALS[number]


def begin(
    settings: Settings,
    rank: PlainRank,
    *,
    is_on_gpu: bool,
    cores: int,
    origins: Mapping[str, str] = NO_ORIGINS,
) -> tuple[Settings, OutsideRuntime]:
    """Become the rank that this process was started as; with what it resumes. ``cores``: of the machine.

    Raises BadInputError where the run's folders are held by another one.
    """
    begin_here()
    rank_info = _rank_info(rank, is_on_gpu=is_on_gpu)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # other launchers may end before their ranks
        parent_death.die_with_parent(os.getppid())
    directories = RunDirectories(settings.run, path_of=at_launch)
    if rank_info.rank == 0:  # who saves; held to the end of the process
        directories.claim(patience_s=_PREDECESSOR_ENDS_S)
    _share_cores(settings, rank_info, cores=cores)
    runtime = OutsideRuntime(rank_info=rank_info, settings=settings, origins=origins)
    if rank_info.rank == 0:
        runtime.directories = directories
    install_root_handler(runtime.logger)
    resume = runtime.resume_word(settings.run.resume)
    return replace(settings, run=replace(settings.run, resume=resume)), runtime


def main(plan: LaunchPlan, rank: PlainRank, *, cores: int) -> int:
    """Run the rank that this process was started as; returns its exit code. ``cores``: of the machine."""
    is_on_gpu = plan.devices[0].visible_index is not None
    settings, runtime = begin(
        plan.settings, rank, is_on_gpu=is_on_gpu, cores=cores, origins=plan.origins
    )
    try:
        report = DDPTrainer(config=settings, runtime=runtime).train()
    except BadInputError:
        raise
    except FaultError as error:
        cause = printable(error.fault.without(runtime.logger.hidden).cause)
        sys.stderr.write(f"ddp_runner: error: rank {rank.rank}: {cause}\n")
        is_bad_input = error.fault.kind is FaultKind.BAD_INPUT  # found with the other ranks
        code = int(ExitCode.BAD_USAGE if is_bad_input else ExitCode.FAILED)
        if holds_communicators():
            _end_at_once(code)
        return code
    return int(EXIT_CODE_OF_STATUS[conclude(settings, runtime, report)])


def conclude(settings: Settings, runtime: OutsideRuntime, report: TrainReport) -> RunStatus:
    """Training has ended: rank 0 sums the job up. How it has ended."""
    status = STATUS_OF_REASON[report.reason]
    if runtime.rank_info.rank == 0:
        _write_summary(settings, runtime, report, status=status)
    return status


def _end_at_once(code: int) -> NoReturn:
    """End without what Python and torch do at the end, which would abort this rank's communicators.

    What they leave the other ranks would take for whole: those are ended by the launcher.
    """
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # user code may have closed it
            stream.flush()
    os._exit(code)


def _share_cores(settings: Settings, rank_info: RankInfo, *, cores: int) -> None:
    """Threads as the user set them, else as the launcher did, else this rank's share of the cores.

    Sums over other shares differ in their last bit, so a run must not depend on who starts it.
    """
    threads = settings.run.threads_per_rank
    if not threads and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, cores // rank_info.local_world_size)
    if threads:
        torch.set_num_threads(threads)


def _rank_info(rank: PlainRank, *, is_on_gpu: bool) -> RankInfo:
    return RankInfo(
        rank=rank.rank,
        local_rank=rank.local_rank,
        world_size=rank.world_size,
        local_world_size=rank.local_world_size,
        device=visible_gpu(rank.local_rank, torch.cuda.device_count()) if is_on_gpu else "cpu",
        loads=rank.rank == 0,
    )


def _write_summary(
    settings: Settings, runtime: OutsideRuntime, report: TrainReport, *, status: RunStatus
) -> None:
    """Write the summary of all restarts of this job, which count as one run."""
    # Every rank has reported all that it had to before the ranks compared their weights.
    log_dir = at_launch(settings.run.log_dir)
    if _has_summed_up(log_dir, runtime.run_id, report):
        line = f"already complete: {report.steps:,} steps, nothing to train; the result is kept\n"
        sys.stdout.write(line)
        return
    reports = {
        rank: list(read_restart_log(restart_log_path(log_dir, rank)))
        for rank in range(runtime.rank_info.world_size)
    }
    reports[0].append(runtime.restart_progress())  # its own file may be on a disk that is full
    run = replay(reports)
    run.findings.run_id, run.findings.name = runtime.run_id, settings.run.name
    end = EndOfRun(
        status=status,
        exit_code=EXIT_CODE_OF_STATUS[status],
        reading=run.reading_of_all(runtime.slot.read()),
        finished=[finished_message(report, 0)],
        now_s=time.monotonic(),
    )
    summary = run.accounting.summary(
        end,
        facts=run.findings,
        world_size=runtime.rank_info.world_size,
        steps_per_epoch=0,  # the report has the epochs
        own_step_s={},
    )
    write_summary(log_dir / "summary.json", summary)


def _has_summed_up(log_dir: Path, run_id: str, report: TrainReport) -> bool:
    """Return whether an earlier job trained this same result; its summary stays then."""
    try:
        old = read_summary(log_dir / "summary.json")
    except (OSError, ValueError):
        return False
    is_it = (old.run_id, old.steps, old.weights_sha256) == (
        run_id,
        report.steps,
        report.weights_sha256,
    )
    return is_it and old.status is RunStatus.COMPLETED


def _boot() -> str:
    """Return the machine's boot id, which identifies the epoch of its monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
