"""The hashes of what is replicated, of one boundary between steps, taken beside the next step.

Only :meth:`StateHashing.result` waits. What they are compared with, and when, is the guard's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from ddp_runner.checkpoint.snapshot import storage_key
from ddp_runner.training.components.tensor_hash import state_hashes
from ddp_runner.training.state import TrainState

_PORTION_BYTES = 1 << 23  # between two looks at whether it is dropped

Source = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class StateHashing:
    """Hashes a state as it is now; what is steady by a thread, which may read until the next commit.

    What forward writes is hashed at once, and so is what lies on a device, where that takes no time
    and a second stream would have to be kept apart from the next step's. ``source`` gives, within
    the thread, what is to be hashed in the place of steady tensors: a copy of them, or themselves.
    """

    def __init__(self, state: TrainState, *, source: Source) -> None:
        weights, learnt = state.replicated_parts()
        written = state.written_storages()
        steady = {storage_key(one) for one in state.model.parameters()} - written
        self._later = {
            n: each for n, each in weights.items() if each.is_cpu and storage_key(each) in steady
        }
        self._later |= {
            n: each
            for n, each in learnt.items()
            if each.is_cpu and not (written and storage_key(each) in written)
        }
        tensors = {**weights, **learnt}
        self._names = list(tensors)
        self._hashes = state_hashes({n: tensors[n] for n in self._names if n not in self._later})
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
            for portion in self._portions(self._source(self._later)):
                self._hashes |= state_hashes(portion)
        except BaseException as error:  # noqa: BLE001 - top of a thread: result() raises it
            self._failure = error
        finally:
            self._ended.set()

    def _portions(self, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield all of ``tensors``, until the hashes are dropped."""
        portion: dict[str, Tensor] = {}
        size_bytes = 0
        for name, tensor in tensors.items():
            if self._is_dropped:
                return
            portion[name] = tensor
            size_bytes += tensor.nbytes
            if size_bytes >= _PORTION_BYTES:
                yield portion
                portion, size_bytes = {}, 0
        yield portion

    def result(self) -> dict[str, str]:
        """Name -> hash, in the order of the state. Waits for the thread; raises what it raised."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return {name: self._hashes[name] for name in self._names if name in self._hashes}

    def drop(self) -> None:
        """Drop the hashes, which nobody needs any more. Does not wait."""
        self._is_dropped = True
