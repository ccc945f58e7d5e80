"""Runs a fire drill in its own process, and gives a rank its part.

The drill acts like a replacement of one rank, in the background, outside the run.
It uses idle processor and disk time only, and the kernel ends it first when memory is short. It writes to its own
log, and reports its result to the supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from ddp_runner import config
from ddp_runner.features.proof.comparison import compare
from ddp_runner.features.proof.loop_comparison import compare_loop
from ddp_runner.features.proof.loop_notes import LoopDrills
from ddp_runner.features.proof.notes import Drills
from ddp_runner.kernel.rank.process import prepare_interpreter
from ddp_runner.kernel.rules.secrets import hidden_texts, without_secrets
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.system.run_files import open_to_append
from ddp_runner.kernel.wire.events import Diagnosed, Drill, DrillSkipped
from ddp_runner.kernel.wire.fork_specs import DrillSpec
from ddp_runner.kernel.wire.messages import Fork
from ddp_runner.observe.logger import DDPLogger, install_root_handler
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.own_loop.declared import OwnLoop
from ddp_runner.training.own_loop.parts import LoopParts
from ddp_runner.training.rank_context import TaskParts

LOG_NAME = "drill.log"
PROBLEM_CHARACTERS_MAX = 300
_GONE = "its files were removed meanwhile, as the run has gone back to an earlier step or has ended"
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # system calls without a function in the C library
_IOPRIO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13


def beside_steps(parts: TaskParts) -> Drills:
    """Return a rank's part in the drills of its run."""
    return Drills(parts)


def beside_loop(parts: LoopParts, loop: OwnLoop) -> LoopDrills:
    """Return a rank's part in the drills of a user's own loop."""
    return LoopDrills(parts, loop)


def main(request: Fork, descriptors: list[int]) -> int:
    """Run one drill; return its exit status. ``descriptors``: control channel, output."""
    control, output = descriptors
    spec = request.spec
    assert isinstance(spec, DrillSpec)
    parent_death.set_process_name("ddp:drill")
    stand_back()
    parent_death.mark_own_children()
    channel = Channel.from_descriptor(control)
    settings = config.from_record(spec.settings)
    _write_to_log(at_launch(settings.run.log_dir) / LOG_NAME, otherwise=output)
    rank_info = RankInfo(
        rank=spec.rank,
        local_rank=spec.rank % spec.local_world_size,
        world_size=spec.world_size,
        local_world_size=spec.local_world_size,
        device=spec.device,
        other_devices=spec.other_devices,
        loads=spec.program is None,  # a loop receives it with its first batch
        preload=spec.preload,
    )
    prepare_interpreter(spec, rank=rank_info.rank, local_rank=rank_info.local_rank)
    logger = DDPLogger(rank=rank_info.rank, debug=settings.run.debug)
    logger.hidden = hidden = hidden_texts(settings.task, os.environ)
    install_root_handler(logger)
    found: Drill | DrillSkipped | Diagnosed

    def skipped(why: str) -> DrillSkipped:
        return DrillSkipped(rank=spec.rank, step=spec.step, text=why)

    def end(*, differs: str = "", updated: bool = False, problem: str = "") -> NoReturn:
        drill = Drill(rank=spec.rank, step=spec.step, differs=differs, updated=updated)
        _report(channel, skipped(problem) if problem else drill)
        os._exit(0)

    folder = at_launch(spec.folder)
    try:
        if spec.program is not None:
            compare_loop(spec.program, settings, rank_info, folder=folder, logger=logger, end=end)
        found = compare(settings, rank_info, step=spec.step, folder=folder, logger=logger)
    except BaseException as error:  # noqa: BLE001 - the top of a process: no drill is worth a run
        traceback.print_exc()
        text = without_secrets(str(error), hidden)
        problem = " ".join(f"{type(error).__name__}: {text}".split())[:PROBLEM_CHARACTERS_MAX]
        found = skipped(problem if folder.is_dir() else _GONE)
    _report(channel, found)
    return 0


def _report(channel: Channel, message: Drill | DrillSkipped | Diagnosed) -> None:
    """Report the result of the drill, or why there is none."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # user code may have closed it
            stream.flush()
    with contextlib.suppress(ChannelClosedError):  # the supervisor has ended
        channel.send(message)


def stand_back() -> None:
    """Use only idle processor and disk time, as far as the system allows. Child processes inherit this."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    call = _IOPRIO_SET.get(platform.machine())
    if call is not None and sys.platform.startswith("linux"):
        ctypes.CDLL(None).syscall(call, _IOPRIO_PROCESS, 0, _IOPRIO_IDLE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _write_to_log(path: Path, *, otherwise: int) -> None:
    log = otherwise
    with contextlib.suppress(OSError):
        log = open_to_append(path)
    for stream in (1, 2):
        os.dup2(log, stream)
    for descriptor in {log, otherwise}:
        os.close(descriptor)
