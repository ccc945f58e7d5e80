"""A supervised rank from its fork to its exit: surroundings first, then the trainer."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddp_runner import config
from ddp_runner.collective.tcp_store import StoreLink
from ddp_runner.core.board import Board, Cell, Slot
from ddp_runner.core.events import Faulted
from ddp_runner.core.faults import ReportedFaultError
from ddp_runner.core.fork_specs import RankSpec, Surroundings
from ddp_runner.core.injection import Injection, InjectKind, parse_injection
from ddp_runner.core.messages import Fork
from ddp_runner.core.phases import Phase
from ddp_runner.core.settings import Settings
from ddp_runner.observe.files import lossy_text
from ddp_runner.observe.logger import DDPLogger, install_root_handler
from ddp_runner.rank.exit_functions import run_exit_functions
from ddp_runner.rank.runtime import StartupOutput, SupervisedRuntime
from ddp_runner.system import parent_death
from ddp_runner.system.control_channel import Channel
from ddp_runner.system.folder_owner import FolderOwner
from ddp_runner.system.interfaces import interface_of, interface_to
from ddp_runner.training.built_ahead import BuiltAhead
from ddp_runner.training.failure import fault_of
from ddp_runner.training.loaders import collective_timeout_s
from ddp_runner.training.runtime import RankInfo
from ddp_runner.training.trainer import DDPTrainer

config.build_models()  # once, in the zygote that imports this: a replaced rank has no time for it
STACKS_SIGNAL = signal.SIGRTMIN  # nobody sends it to all processes of a run


def main(request: Fork, descriptors: list[int], built: BuiltAhead | None = None) -> int:
    """Run one rank; returns its exit status. ``descriptors``: control channel, board, output.

    ``built``: what this process has built before it was a rank.
    """
    settings, runtime = begin(request, descriptors)
    status = _train(settings, runtime, built)
    run_exit_functions()
    return status


def begin(request: Fork, descriptors: list[int]) -> tuple[Settings, SupervisedRuntime]:
    """Become the rank that ``request`` says; with what it resumes. ``descriptors``: as of :func:`main`."""
    control, board, output_descriptor = descriptors
    spec = request.spec
    assert isinstance(spec, RankSpec)
    parent_death.set_process_name(f"ddp:rank{request.rank}")
    parent_death.mark_own_children()
    settings = config.from_record(spec.settings)
    output = StartupOutput(
        output_descriptor, Path(settings.run.log_dir) / f"rank_{request.rank}.log"
    )
    prepare_interpreter(spec, rank=request.rank, local_rank=request.local_rank)
    logger = DDPLogger(rank=request.rank, debug=settings.run.debug, seal=spec.log_seal)
    install_root_handler(logger)
    rank_info = RankInfo(
        rank=request.rank,
        local_rank=request.local_rank,
        world_size=spec.world_size,
        local_world_size=spec.local_world_size,
        device=spec.device,
        loads=spec.loads,
        short_of_memory_in=spec.short_of_memory_in,
        device_free_bytes=spec.device_free_bytes,
        preload=spec.preload,
        memory_slots=spec.memory_slots,
        has_saver=spec.has_saver,
        log_folder=spec.log_folder,
        other_devices=spec.other_devices,
        mode=spec.mode,
        code=spec.code,
    )
    slot = _map_slot(board, rank_info)
    slot.stamp(Phase.STARTUP, time.monotonic_ns())  # a spare that was made a rank has begun
    link = StoreLink(
        spec.store_host,
        spec.store_port,
        timeout_s=collective_timeout_s(settings, is_watched=True),
    )
    link.connect_ahead()
    term = spec.term
    runtime = SupervisedRuntime(
        Channel.from_descriptor(control),
        rank_info=rank_info,
        slot=slot,
        logger=logger,
        output=output,
        link=link,
        injections=_injections(settings, spec),
        owner=FolderOwner(Path(settings.run.checkpoint_dir), term) if term else None,
        trouble=shared_trouble(spec.saver_trouble) if request.rank == 0 else None,
        folder=Path(settings.run.checkpoint_dir),
    )
    return config_with_resume(settings, spec.resume), runtime


def shared_trouble(path: str) -> memoryview | None:
    """Map the disk faults that this rank shares with its writer process; None if nothing is shared."""
    if not path:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # the supervisor has just ended, and so does this process
        return None
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    return memoryview(memory)


def _injections(settings: Any, spec: RankSpec) -> dict[int, Injection] | None:
    """Return the rank's injections from ``--inject`` that are still to come; None if nothing is injected."""
    if not settings.run.inject:
        return None
    return {
        number: replace(injection, times=times)
        for number, times in spec.injections_left.items()
        if isinstance(
            injection := parse_injection(settings.run.inject[number], world_size=spec.world_size),
            Injection,
        )
        and injection.kind is not InjectKind.BAD_SAMPLE  # the data holds it: training/loaders.py
    }


def config_with_resume(settings: Any, resume: str) -> Any:
    """The settings with what this process is to resume from."""
    return replace(settings, run=replace(settings.run, resume=resume))


def prepare_interpreter(spec: Surroundings, *, rank: int, local_rank: int) -> None:
    """Set up the interpreter as user code finds it in a rank: signals, standard streams, environment."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the supervisor's to handle
    sys.stdout, sys.stderr = lossy_text(1), lossy_text(2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
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


def _train(settings: Any, runtime: SupervisedRuntime, built: BuiltAhead | None) -> int:
    """The rank boundary: whatever escapes the trainer becomes a Fault and an exit status."""
    try:
        DDPTrainer(
            rank=runtime.rank_info.rank,
            world_size=runtime.rank_info.world_size,
            config=settings,
            runtime=runtime,
            built=built,
        ).train()
    except ReportedFaultError:
        return 1
    except BaseException as error:  # noqa: BLE001 - the rank boundary
        report_end(runtime, error)
        return 1
    return 0
