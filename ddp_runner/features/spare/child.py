"""A spare: forked and warmed up ahead, then asleep until it is made the rank that has died.

It runs nothing of the user's beyond what the zygote has imported, and keeps no more memory of its
own than what it has warmed up: on a GPU none. One that builds
ahead (building) has run the task's own building, too, and holds what that made.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner import config
from ddp_runner.core.settings import Settings
from ddp_runner.data.loader import MicroBatch
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.features.spare.building import Built, build, first_to_end, spare_children
from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.group import Membership, joined
from ddp_runner.kernel.group.tcp_store import StoreLink
from ddp_runner.kernel.replica.replica import Replica
from ddp_runner.kernel.step.session import Votes
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Slot
from ddp_runner.kernel.wire.events import SpareReady
from ddp_runner.kernel.wire.fork_specs import RankSpec, SpareKind, SpareSpec
from ddp_runner.kernel.wire.messages import Fork
from ddp_runner.rank import trained
from ddp_runner.training.components.loss_monitor import LossMonitor
from ddp_runner.training.components.loss_spikes import LossSpikes
from ddp_runner.training.components.optimizer import build_optimizer
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.components.tuning import Tuning
from ddp_runner.training.state import DataState, Trained, TrainState, Watches
from ddp_runner.training.step import Stepper, StepRules
from ddp_runner.values.generators import generators_kept

_WIDTH = 8
_SAMPLES = 2
_STEPS = 2  # the first one builds what the second one uses
CUDA = "libcuda.so.1"
# torch's CUDA library brings most others along. cuDNN's loads its parts when a convolution asks for
# them; they lie beside it, whether it came with torch or with the system.
_LOADS_MORE = "libcudnn.so"
_PARTS = "libcudnn_*.so*"


def main(request: Fork, descriptors: list[int]) -> int:
    """Warm up, say so, and sleep; then run as the rank that is asked for, and return its status."""
    parent_death.set_process_name("ddp:spare")
    control, output = descriptors
    for stream in (1, 2):  # its zygote's until now
        os.dup2(output, stream)
    channel = Channel.from_descriptor(control)
    spec = request.spec
    assert isinstance(spec, SpareSpec)
    torch.set_num_threads(spec.threads)
    kind, settings = spec.kind, config.from_record(spec.settings)
    if kind is SpareKind.LIBRARIES:
        start_libraries()
    else:
        warm_up(settings)
    with contextlib.ExitStack() as held:
        built: Built | None = None
        if kind is SpareKind.MODEL:
            score = held.enter_context(first_to_end())
            built = build(settings, spec)
            spare_children(score)
            sys.stdout.flush()
            sys.stderr.flush()
        ready = SpareReady()
        if built is not None:
            ready = SpareReady(built_bytes=built.held_bytes, build_s=built.took_s)
        try:
            channel.send(ready)
            taken, inherited = channel.receive()
        except ChannelClosedError:
            return 0
    channel.close()
    if not isinstance(taken, Fork):
        raise TypeError(f"a spare only becomes a rank; got {type(taken).__name__}")
    assert isinstance(taken.spec, RankSpec)
    known = settings if taken.spec.settings == spec.settings else None
    if built is None:
        os.close(output)
        return trained.main(taken, inherited, settings=known)
    # What the task has said is the rank's, wherever it may have led its output since.
    with contextlib.suppress(OSError):
        os.write(inherited[-1], os.pread(output, os.fstat(output).st_size, 0))
    os.close(output)
    return trained.main(taken, inherited, built.ahead, known)


def start_libraries() -> CudaDriver | None:
    """Have CUDA's driver started and its libraries loaded. Raises RuntimeError if that holds memory.

    None on ROCm, whose libraries come with torch, and of whose memory nobody is asked.
    """
    if torch.version.hip:
        return None
    driver = CudaDriver()
    load_libraries()
    # INVARIANT no-context: a spare that serves every GPU holds no memory of any.
    # Broken if: it computes, also on the CPU (autograd starts a thread for each device), or asks torch
    # for a device. Guarded by: test_a_spare_with_libraries_ends_rather_than_hold_memory_of_a_gpu.
    opened = driver.opened()
    if opened:
        raise RuntimeError(f"loading the libraries has opened the GPUs {opened}")
    return driver


def warm_up(settings: Settings) -> None:
    """Train a toy alone, so that this process has everything at hand that a first step looks up.

    A forked process finds each page of torch, and each page that it writes to, by a fault of its
    own; and each first call resolves what it calls.
    """
    device = torch.device("cpu")
    alone = Membership(generation=0, rank=0, world_size=1, local_rank=0, local_world_size=1)
    slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
    with (
        _random_numbers_untouched(),
        joined(
            alone,
            link=StoreLink("127.0.0.1", 0, timeout_s=60.0),
            backend="gloo",
            device=device,
            timeout_s=60.0,
            switch=AbortSwitch(),
        ) as group,
    ):
        state = _toy(settings, device)
        replica = Replica(state.model, _loss, group=group, settings=settings.ddp, slot=slot)
        _train(settings, state, replica, slot)
        replica.close()
    del state, replica
    gc.collect()


@contextlib.contextmanager
def _random_numbers_untouched() -> Iterator[None]:
    # INVARIANT same-numbers: a rank that was a spare draws what any fork of the zygote would, also in
    # user code that seeds nothing. Broken if: the toy's numbers come from the global generators.
    # Guarded by: test_warming_up_changes_no_random_number.
    with generators_kept():
        yield


def _toy(settings: Settings, device: torch.device) -> TrainState:
    # Device and type are named because a task's module may have changed torch's defaults.
    where: dict[str, Any] = {"device": device, "dtype": torch.float32}
    model = nn.Sequential(
        nn.Linear(_WIDTH, _WIDTH, **where), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH, **where)
    )
    return TrainState(
        Trained(
            model=model,
            optimizer=build_optimizer(model, settings.optim, device=device),
            precision=Precision("fp32", device=device),
        ),
        watches=Watches(
            monitor=LossMonitor(target_loss=None, max_errors_per_epoch=1),
            loss_spikes=LossSpikes.watched_as(settings, total_steps=_STEPS),
        ),
        data=DataState(quarantine=Quarantine(seed=0, dataset_size=_SAMPLES, bad_max=0)),
        tuning=Tuning(
            micro_batch_size=_SAMPLES,
            evaluation_batch_size=_SAMPLES,
            find_unused_parameters=settings.ddp.find_unused_parameters is not False,
        ),
    )


def _train(settings: Settings, state: TrainState, replica: Replica, slot: Slot) -> None:
    """Steps, and what a rank does with a state that it receives."""
    device = torch.device("cpu")
    rules = StepRules(
        seed=0,
        rank=0,
        global_batch=_SAMPLES,
        total_steps=_STEPS,
        optim=settings.optim,
        device=device,
    )
    stepper = Stepper(state, replica, rules=rules, slot=slot)
    state.committed_step = 0
    batch = torch.ones(_SAMPLES, _WIDTH, device=device, dtype=torch.float32)
    for _ in range(_STEPS):
        stepper.run([MicroBatch(batch=batch, indices=tuple(range(_SAMPLES)))], votes=Votes())
    state.restore(state.capture())


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch), batch)


class CudaDriverError(RuntimeError):
    """The driver refused; the message says what, and its number."""


class CudaDriver:
    """CUDA's driver, started in this process by making one of these, without a context: no memory of a GPU is held.

    It is asked by its C functions, because torch opens the device with most of what it is asked. Never made
    in the zygote: a driver that has been started is of no use to a fork. Raises OSError where there is none.
    """

    def __init__(self, library: str = CUDA) -> None:
        self._library = ctypes.CDLL(library)
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: object) -> None:
        error = int(getattr(self._library, name)(*arguments))
        if error:
            raise CudaDriverError(f"{name}: CUDA error {error}")

    def _device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device

    def device_count(self) -> int:
        """Return how many GPUs this process sees."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def opened(self) -> list[int]:
        """Return the GPUs on which this process has a context, which is some hundred MB of their memory."""
        found = []
        for index in range(self.device_count()):
            flags, is_active = ctypes.c_uint(), ctypes.c_int()
            self._call(
                "cuDevicePrimaryCtxGetState",
                self._device(index),
                ctypes.byref(flags),
                ctypes.byref(is_active),
            )
            found += [index] * bool(is_active.value)
        return found


def load_libraries() -> list[str]:
    """Load what the libraries that are loaded would load on first use; returns the files."""
    loaded = {line.split()[-1] for line in _maps() if "/" in line}
    folders = {Path(path).parent for path in loaded if Path(path).name.startswith(_LOADS_MORE)}
    files = sorted(str(path.resolve()) for folder in folders for path in folder.glob(_PARTS))
    found = []
    for file in dict.fromkeys(files):
        # One that needs what is not there is one that a rank could not use either.
        with contextlib.suppress(OSError):
            ctypes.CDLL(file, mode=os.RTLD_LAZY)
            found.append(file)
    return found


def _maps() -> list[str]:
    return (
        Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    )
