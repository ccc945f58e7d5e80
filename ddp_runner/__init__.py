"""Fault-tolerant PyTorch DistributedDataParallel training: kill anything, any time.

The public names below load when first used, so that neither the command nor the supervisor ever
imports torch. ARCHITECTURE.md maps the rooms.
"""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"]:  # python looks for the module to run: perhaps for ours
    from ddp_runner.start import leave_working_directory

    leave_working_directory()

from importlib import import_module
from typing import TYPE_CHECKING

from ddp_runner.version import VERSION

if TYPE_CHECKING:
    from ddp_runner.cli.from_code.from_python import bench, find_batch_size, run
    from ddp_runner.cli.from_code.launch import launch
    from ddp_runner.cli.from_code.launch_async import launch_async
    from ddp_runner.core.settings import Settings
    from ddp_runner.data.epoch_loader import SafeDataLoader
    from ddp_runner.data.shard_files import JsonLines, TarSamples, TextLines
    from ddp_runner.data.shards import ShardedStream
    from ddp_runner.kernel.replica.loss import Weighted
    from ddp_runner.kernel.rules.errors import BadInputError
    from ddp_runner.memory.manager import MemoryManager
    from ddp_runner.observe.gpu_watch import GpuWatch
    from ddp_runner.observe.logger import DDPLogger
    from ddp_runner.rank.attach import attach, is_supervised
    from ddp_runner.system.heartbeat import heartbeat
    from ddp_runner.training.own_loop.attached_run import AttachedRun
    from ddp_runner.training.own_loop.declared import RepeatStep
    from ddp_runner.training.task import Datasets, EpochContext, StepContext, Task
    from ddp_runner.training.trainer import DDPTrainer

__version__ = VERSION
__all__ = [
    "AttachedRun",
    "BadInputError",
    "DDPLogger",
    "DDPTrainer",
    "Datasets",
    "EpochContext",
    "GpuWatch",
    "JsonLines",
    "MemoryManager",
    "RepeatStep",
    "SafeDataLoader",
    "Settings",
    "ShardedStream",
    "StepContext",
    "TarSamples",
    "Task",
    "TextLines",
    "Weighted",
    "__version__",
    "attach",
    "bench",
    "find_batch_size",
    "heartbeat",
    "is_supervised",
    "launch",
    "launch_async",
    "run",
]
_HOME_OF_NAME = {
    "AttachedRun": "ddp_runner.training.own_loop.attached_run",
    "BadInputError": "ddp_runner.kernel.rules.errors",
    "DDPLogger": "ddp_runner.observe.logger",
    "DDPTrainer": "ddp_runner.training.trainer",
    "Datasets": "ddp_runner.training.task",
    "EpochContext": "ddp_runner.training.task",
    "GpuWatch": "ddp_runner.observe.gpu_watch",
    "JsonLines": "ddp_runner.data.shard_files",
    "MemoryManager": "ddp_runner.memory.manager",
    "RepeatStep": "ddp_runner.training.own_loop.declared",
    "SafeDataLoader": "ddp_runner.data.epoch_loader",
    "Settings": "ddp_runner.core.settings",
    "ShardedStream": "ddp_runner.data.shards",
    "StepContext": "ddp_runner.training.task",
    "TarSamples": "ddp_runner.data.shard_files",
    "Task": "ddp_runner.training.task",
    "TextLines": "ddp_runner.data.shard_files",
    "Weighted": "ddp_runner.kernel.replica.loss",
    "attach": "ddp_runner.rank.attach",
    "bench": "ddp_runner.cli.from_code.from_python",
    "find_batch_size": "ddp_runner.cli.from_code.from_python",
    "heartbeat": "ddp_runner.system.heartbeat",
    "is_supervised": "ddp_runner.rank.attach",
    "launch": "ddp_runner.cli.from_code.launch",
    "launch_async": "ddp_runner.cli.from_code.launch_async",
    "run": "ddp_runner.cli.from_code.from_python",
}


def __getattr__(name: str) -> object:
    """Import a public name's home on first use (PEP 562)."""
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'ddp_runner' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
