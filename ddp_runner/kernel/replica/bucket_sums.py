"""The sums over ranks of DDP's buckets on the CPU, and of its map of the used parameters.

DDP with ``find_unused_parameters`` sums a map after each backward: which parameters each rank has used
(torch, csrc/distributed/c10d/reducer.cpp: all_reduce_local_used_map). On most steps every rank has used
all of them. That is one number, and it rides along with the last bucket; only where it says otherwise
is the map itself summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from ddp_runner.kernel.group.group import Group


class _Sum(NamedTuple):
    """A bucket of gradients that is being summed over ranks; ``take`` then gives DDP its sums."""

    work: dist.Work
    take: Callable[[], object]


class _Known(NamedTuple):
    """Constants of a bucket on the CPU: its memory, its number of elements, and where the signals begin in it."""

    place: tuple[int, int]
    signals_at: int | None
    # Says that the bucket holds its sums, and keeps its memory.
    summed: torch.futures.Future[Tensor]
    flag: Any  # the one number in it that says whether all parameters were used, seen by numpy


class BucketSums:
    """Sums the gradient buckets of one replica over ranks, for one backward at a time."""

    def __init__(
        self,
        group: Group,
        signal: Tensor,
        *,
        not_all_used: int,
        gradient_dtype: str,
        on_begun: Callable[[], None],
    ) -> None:
        """``signal``: the parameter whose gradient is summed as it is, in float32.

        ``not_all_used``: its number of ranks that have left out a parameter. ``gradient_dtype``: that
        others are summed in. ``on_begun`` is called when the last bucket is on its way.
        """
        self._group = group
        self._signal = signal
        self._not_all_used = not_all_used
        self._sent_as = DTYPES.get(gradient_dtype)  # None: as they are computed
        self._on_begun = on_begun
        self._under_way: list[_Sum] = []
        self._known: dict[int, _Known] = {}  # by the number of the bucket; on the CPU only
        self._last: tuple[Tensor, _Known] | None = None  # waits for the map
        # Whether the last step had an unused parameter: the same on all ranks, who all know the sum.
        self._sums_map = False
        self._is_learning = False  # DDP, a static graph: see is_last
        self.finds_unused = False  # whether DDP sums its map
        self.all_used: bool | None = None  # in the last backward, on every rank; None: not known
        self.failure: Exception | None = None  # of a sum over ranks, in the step in hand

    def drop(self) -> None:
        """A step begins: what is left of another one is for nothing."""
        self._under_way.clear()
        self._last = self.all_used = self.failure = None
        self._is_learning = False

    def is_last(self, bucket: GradBucket) -> bool:
        """Return True if no further sum begins after that of ``bucket`` in this backward.

        DDP numbers all buckets 0 in the backward from which it learns a static graph. Each of them may be the last.
        """
        return bucket.is_last() or self._is_learning

    def begin(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to sum ``bucket``; what DDP is to wait for.

        DDP waits when it has handed over the last one, where nobody could end its wait. So all of
        them are waited for before it does: here, or when it sums its map.
        """
        try:
            self._group.refuse_aborted()
        except ConnectionError as error:
            self.failure = error
            raise
        buffer, is_last = bucket.buffer(), self.is_last(bucket)
        if self._group.ends_in_silence:
            # The device waits, and the abort of its communicators ends that.
            sent, taken = self._sent(buffer, self._signals_beside_rounded(bucket))
            work = self._group.begin_sum(sent)
            if is_last:
                self._on_begun()
            summed: torch.futures.Future[Tensor] = work.get_future().then(lambda _: taken())
            return summed
        if not buffer.is_cpu:
            # gloo's sum of a GPU's tensors is waited for like any other: handed on as it is, DDP may
            # use it before it is there (torch before 2.11: pytorch#155714, #170812).
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
            self._begin(buffer, self._signals_beside_rounded(bucket), future)
        else:
            known = self._known_of(bucket, buffer)
            future = known.summed
            if is_last and self.finds_unused and known.flag is not None:
                self._last = buffer, known
                return future
            self._begin(buffer, known.signals_at)
        if is_last:
            self._on_begun()
            if not self.finds_unused:
                self.finish()
        return future

    def sum_map(self, used: Tensor) -> dist.Work | None:
        """Sum DDP's map of the parameters that this rank has ``used``, and wait for all buckets.

        None where DDP's own collective has to sum it; :meth:`finish` then.
        """
        if self._last is None:
            self._is_learning = not self.finds_unused  # DDP then sums its map before any bucket
            return None
        (buffer, known), self._last = self._last, None
        parameters = used.numpy()  # a tenth of the time that a tensor takes for so few
        known.flag[0] = not parameters.all()
        last = self._begin(buffer, known.signals_at)
        self._on_begun()
        if self._sums_map:  # as it was needed last time, nobody waits to know
            self._under_way.append(_Sum(self._group.begin_sum(used), lambda: None))
        self.finish()
        self.all_used = bool(known.flag[0] == 0.0)
        if self._sums_map:
            self._sums_map = not self.all_used
        elif self.all_used:
            parameters.fill(self._group.world_size)
        else:
            self._sums_map = True
            return None
        return last

    def finish(self) -> None:
        """Wait for all that is under way. Raises what the sums raise."""
        try:
            for one in self._under_way:
                self._group.wait_for(one.work)
                one.take()
        except Exception as error:
            self.failure = error
            raise
        self._under_way.clear()

    def _begin(
        self,
        buffer: Tensor,
        signals_at: int | None,
        future: torch.futures.Future[Tensor] | None = None,
    ) -> dist.Work:
        sent, taken = self._sent(buffer, signals_at)
        work = self._group.begin_sum(sent)
        take = taken if future is None else lambda: future.set_result(taken())
        self._under_way.append(_Sum(work, take))
        return work

    def _sent(self, buffer: Tensor, signals_at: int | None) -> tuple[Tensor, Callable[[], Tensor]]:
        if self._sent_as in (None, buffer.dtype) or buffer.is_complex():
            return buffer, lambda: buffer
        assert self._sent_as is not None, "as above"
        exact = None
        if signals_at is not None:
            exact = slice(signals_at, signals_at + self._signal.numel())
        sent = Sent(
            buffer,
            dtype=self._sent_as,
            exact=exact,
            rank=self._group.rank,
            world_size=self._group.world_size,
        )
        return sent.tensor, sent.taken

    def _known_of(self, bucket: GradBucket, buffer: Tensor) -> _Known:
        """DDP keeps a bucket's memory from step to step, so what says that it is summed is kept as well."""
        number, place = bucket.index(), (buffer.data_ptr(), buffer.numel())
        known = self._known.get(number)
        if known is not None and known.place == place:
            return known
        if known is not None:  # DDP has laid them out again: who keeps one keeps its memory
            self._known.clear()
        summed: torch.futures.Future[Tensor] = torch.futures.Future()
        summed.set_result(buffer)
        signals_at, flag = self._signals_in(bucket), None
        if signals_at is not None:
            flag = buffer[signals_at + self._not_all_used :][:1].numpy()
        known = _Known(place, signals_at, summed, flag)
        self._known[number] = known
        return known

    def _signals_beside_rounded(self, bucket: GradBucket) -> int | None:
        """Return where the signals begin in ``bucket``, to keep them from rounding; None if nothing is to be done.

        This is looked up in each step, as DDP lays its buckets out again after the first one. This class keeps no
        GPU memory, so a new bucket may have the address and size of an old one, with its parameters in another order.
        """
        return None if self._sent_as is None else self._signals_in(bucket)

    def _signals_in(self, bucket: GradBucket) -> int | None:
        parameters = bucket.parameters()
        for number, parameter in enumerate(parameters):
            if parameter is self._signal:
                return sum(one.numel() for one in parameters[:number])
        return None


# Gradients that are summed over ranks in another type than they are computed in. What rides
# along with them, the signals, stays as exact as it is: each byte of them travels as a whole
# number below 256, which every floating-point type has, in a place of its rank's own, where all
# others add zero. So nothing is added to a step but these few numbers.

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Sent:
    """A bucket on its way: ``tensor`` is to be summed over ranks, then :meth:`taken` gives the bucket."""

    def __init__(
        self,
        buffer: Tensor,
        *,
        dtype: torch.dtype,
        exact: slice | None,
        rank: int,
        world_size: int,
    ) -> None:
        """``exact``: where in ``buffer``, which then is of float32, there are numbers to be summed as they are."""
        self._buffer = buffer
        self._exact = exact
        self._world_size = world_size
        if exact is None:
            self.tensor = buffer.to(dtype)
            return
        own = buffer[exact].contiguous().view(torch.uint8)
        slots = torch.zeros(world_size, own.numel(), dtype=dtype, device=buffer.device)
        slots[rank] = own.to(dtype)
        self.tensor = torch.cat([buffer.to(dtype), slots.view(-1)])

    def taken(self) -> Tensor:
        """The buffer, with the sums in it."""
        size = self._buffer.numel()
        summed = self.tensor[:size].to(self._buffer.dtype)
        if self._exact is not None:
            slots = self.tensor[size:].view(self._world_size, -1).to(torch.uint8)
            summed[self._exact] = slots.view(torch.float32).sum(dim=0)
        return self._buffer.copy_(summed)
