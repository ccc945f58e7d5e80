"""The hashes of what is replicated, of one boundary between steps, taken beside the next step.

Only :meth:`StateHashing.result` waits. What they are compared with, and when, is the guard's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from ddp_runner.checkpoint.snapshot import storage_key
from ddp_runner.training.components.tensor_hash import tensor_hash
from ddp_runner.training.state import TrainState

Source = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class StateHashing:
    """Hashes a state as it is now; what is steady by a thread, which may read until the next commit.

    What forward writes is hashed at once, and so is what lies on a device, where that takes no time
    and a second stream would have to be kept apart from the next step's. ``source`` gives, within
    the thread, what is to be hashed in the place of steady tensors: a copy of them, or themselves.
    """

    def __init__(self, state: TrainState, *, source: Source) -> None:
        steady = {storage_key(t) for t in state.steady_tensors() if t.device.type == "cpu"}
        tensors = {name: each for name, each in state.replicated().items() if each.numel()}
        self._names = list(tensors)
        self._later = {n: each for n, each in tensors.items() if storage_key(each) in steady}
        self._hashes = {
            name: tensor_hash(each) for name, each in tensors.items() if name not in self._later
        }
        self._source = source
        self._is_dropped = False
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        try:
            threading.Thread(target=self._run, name="state-hash").start()
        except RuntimeError:  # there is no thread to be had: training waits
            self._run()

    def _run(self) -> None:
        """Thread: hash what is steady."""
        try:
            for name, tensor in self._source(self._later).items():
                if self._is_dropped:
                    return
                self._hashes[name] = tensor_hash(tensor)
        except BaseException as error:  # noqa: BLE001 - top of a thread: result() raises it
            self._failure = error
        finally:
            self._ended.set()

    def result(self) -> dict[str, str]:
        """Name -> hash, in the order of the state. Waits for the thread; raises what it raised."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return {name: self._hashes[name] for name in self._names}

    def drop(self) -> None:
        """Nobody wants to know any more. Does not wait."""
        self._is_dropped = True
