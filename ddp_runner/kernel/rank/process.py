"""A supervised rank: its interpreter, its link to the supervisor, its fences and its end. What it trains is given to it."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ddp_runner.kernel.group.tcp_store import StoreLink
from ddp_runner.kernel.rank.exit_functions import run_exit_functions
from ddp_runner.kernel.rank.runtime import StartupOutput, SupervisedRuntime, lossy_text
from ddp_runner.kernel.rules.faults import ReportedFaultError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.failure import fault_of
from ddp_runner.kernel.step.runtime import Log, RankInfo
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.control_channel import Channel
from ddp_runner.kernel.system.folder_owner import FolderOwner
from ddp_runner.kernel.system.interfaces import interface_of, interface_to
from ddp_runner.kernel.wire.board import Board, Cell, Slot
from ddp_runner.kernel.wire.events import Faulted
from ddp_runner.kernel.wire.fork_specs import RankSpec, Surroundings
from ddp_runner.kernel.wire.messages import Fork
from ddp_runner.start import write_stacks_when_asked


def become(request: Fork, output: int, *, log: Path) -> StartupOutput:
    """Make this process the rank that ``request`` says, for all who see it; what it prints goes to ``log``."""
    spec = request.spec
    assert isinstance(spec, RankSpec)
    parent_death.set_process_name(f"ddp:rank{request.rank}")
    parent_death.mark_own_children()
    startup = StartupOutput(output, log)
    prepare_interpreter(spec, rank=request.rank, local_rank=request.local_rank)
    return startup


def linked(
    request: Fork,
    descriptors: list[int],
    *,
    logger: Log,
    output: StartupOutput,
    folder: Path,
    timeout_s: float,
    surround: Callable[[SupervisedRuntime], None],
) -> SupervisedRuntime:
    """Return the rank's link to the supervisor and its store. ``descriptors``: control channel, board.

    ``folder``: of checkpoints, that has one owner; ``timeout_s``: of the store; ``surround``: as of the runtime.
    """
    control, board = descriptors
    spec = request.spec
    assert isinstance(spec, RankSpec)
    rank_info = RankInfo(
        rank=request.rank,
        local_rank=request.local_rank,
        world_size=spec.world_size,
        local_world_size=spec.local_world_size,
        device=spec.device,
        loads=spec.loads,
        short_of_memory_in=spec.short_of_memory_in,
        device_free_bytes=spec.device_free_bytes,
        not_after=spec.not_after,
        preload=spec.preload,
        memory_slots=spec.memory_slots,
        local_slots=spec.local_slots,
        has_saver=spec.has_saver,
        log_folder=spec.log_folder,
        other_devices=spec.other_devices,
        mode=spec.mode,
        code=spec.code,
    )
    slot = _map_slot(board, rank_info)
    slot.stamp(Phase.STARTUP, time.monotonic_ns())  # a spare that was made a rank has begun
    link = StoreLink(spec.store_host, spec.store_port, timeout_s=timeout_s)
    link.connect_ahead()
    return SupervisedRuntime(
        Channel.from_descriptor(control),
        rank_info=rank_info,
        slot=slot,
        logger=logger,
        output=output,
        link=link,
        owner=FolderOwner(folder, spec.term) if spec.term else None,
        surround=surround,
    )


def run_to_end(runtime: SupervisedRuntime, train: Callable[[], object]) -> int:
    """Have the rank ``train``, and return its exit status: whatever escapes becomes a Fault."""
    status = _train(runtime, train)
    run_exit_functions()
    return status


def prepare_interpreter(spec: Surroundings, *, rank: int, local_rank: int) -> None:
    """Set up the interpreter as user code finds it in a rank: signals, standard streams, environment."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the supervisor's to handle
    sys.stdout, sys.stderr = lossy_text(1), lossy_text(2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    faulthandler.enable()
    write_stacks_when_asked()
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(spec.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(spec.node),
            "MASTER_ADDR": spec.store_host,
            "MASTER_PORT": str(spec.store_port),
        }
    )
    address = spec.local_addr
    if interface := interface_of(address) or interface_to(spec.store_host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    torch.set_num_threads(spec.threads)
    if spec.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)


def _map_slot(descriptor: int, rank_info: RankInfo) -> Slot:
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    return Board(memoryview(memory), rank_info.world_size).slot(rank_info.rank)


def report_end(runtime: SupervisedRuntime, error: BaseException) -> None:
    """Report what has escaped from a rank, which ends of it."""
    reading = runtime.slot.read()
    fault = fault_of(
        error,
        rank=runtime.rank_info.rank,
        step=max(0, reading.step),
        phase=reading.phase.label,
        aborted=False,
    )
    runtime.slot.set(Cell.PHASE_SINCE_NS, time.monotonic_ns())
    runtime.report(Faulted(generation=reading.generation, fault=fault))


def _train(runtime: SupervisedRuntime, train: Callable[[], object]) -> int:
    try:
        train()
    except ReportedFaultError:
        return 1
    except BaseException as error:  # noqa: BLE001 - the rank boundary
        report_end(runtime, error)
        return 1
    return 0
