"""Map-style data as a loader's source: samples by index, each of which any worker can load at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_runner.data.attributes import CountedReads
from ddp_runner.data.loader_faults import fault_of_failure, fault_of_samples
from ddp_runner.data.loader_repair import SampleRepair, Trouble
from ddp_runner.data.order import micro_batch_count
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.data.source import SEVERAL, Cut, MicroBatch, Source
from ddp_runner.data.workers.fetch import BatchKey, SampleFailed, SampleReader
from ddp_runner.kernel.rules.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddp_runner.data.loader_faults import LoaderKills
    from ddp_runner.kernel.rules.faults import Fault

_NOBODY_SURVIVES = "no process survives it"


class MapSource(Source[BatchKey]):
    """Serves a map-style dataset, also one that is preloaded; a key is a micro-batch.

    Per sample, python's, numpy's and torch's CPU generator are seeded from ``(seed, epoch,
    index)``, unless the dataset has ``deterministic = True``: augmentation does not depend on
    workers, retries or the world size.

    ``suspect`` is the sample that a process before this one was loading when it ended: a worker tries
    it before this process does.
    """

    runs_ahead = True

    def __init__(
        self,
        reader: SampleReader,
        cut: Cut,
        *,
        quarantine: Quarantine | None = None,
        phase: Phase = Phase.DATA,
        suspect: int | None = None,
    ) -> None:
        super().__init__(cut)
        self.phase = phase
        self._reader = reader
        if quarantine is None:  # no sample may be bad
            quarantine = Quarantine(seed=0, dataset_size=cut.order.dataset_size, bad_max=0)
        self._quarantine = quarantine
        self._suspect = suspect
        self._reads = CountedReads(reader.dataset)
        self._given: dict[int, tuple[BatchKey, ...]] = {}  # what the last two steps were given

    @property
    def counted(self) -> tuple[str, ...]:
        """See :attr:`Source.counted`."""
        return self._reads.names

    def due(self, step: int) -> int:
        """Return the number of micro-batches of ``step``."""
        return micro_batch_count(self.cut.span(step)[1], self.cut.micro_batch_size)

    def keys(self, steps: Iterable[int]) -> Iterator[BatchKey]:
        """Their micro-batches, with stand-ins for what is known to be bad by now."""
        last_epoch = -1
        for step in steps:
            epoch, _ = self.cut.order.position(step)
            if epoch != last_epoch:
                self._quarantine.refresh()
                last_epoch = epoch
            for piece in self.cut.pieces(step):
                indices = tuple(self._quarantine.stand_in(index) for index in piece.tolist())
                yield BatchKey(epoch=epoch, indices=indices)

    def reader(self) -> SampleReader:
        """The same for all steps."""
        return self._reader

    def read(self, key: BatchKey, *, on_sample: Callable[[int], None]) -> Any | SampleFailed:
        """Load the samples and collate them."""
        if self._reader.gives_many:
            on_sample(SEVERAL)
        with self._reads.around_load():
            return self._reader.load_here(key, on_sample=on_sample)

    def go_to(self, step: int) -> None:
        """Move to ``step``; every step can be reached at no cost."""
        self._given = {}
        self.step = step

    def use(self, cut: Cut) -> None:
        """See :meth:`Source.use`."""
        self._given = {}
        self.cut = cut

    def taken(self, step: int, read: Sequence[tuple[BatchKey, Any]]) -> list[MicroBatch]:
        """See :meth:`Source.taken`."""
        before = {step - 1: self._given[step - 1]} if step - 1 in self._given else {}
        self._given = {**before, step: tuple(key for key, _ in read)}
        self.step = step + 1
        return _micro_batches(read)

    def given_again(
        self,
        step: int,
        load: Callable[[tuple[BatchKey, ...]], list[tuple[BatchKey, Any]] | None],
    ) -> list[MicroBatch] | None:
        """Load one of the last two steps again, by its keys."""
        keys = self._given.get(step)
        found = load(keys) if keys else None
        return None if found is None else _micro_batches(found)

    def suspected(self, step: int) -> Trouble | None:
        """A sample that hung, or broke, the process before this one would do so again."""
        suspect, self._suspect = self._suspect, None
        if suspect is None:
            return None
        epoch, _ = self.cut.order.position(step)
        fault = fault_of_samples(
            (suspect,),
            _NOBODY_SURVIVES,
            detail="",
            rank=self.cut.rank,
            step=step,
            epoch=epoch,
            phase=self.phase.label,
        )
        key = BatchKey(epoch=epoch, indices=(suspect,))
        return Trouble(fault=fault, why=_NOBODY_SURVIVES, key=key)

    def fault_of(self, failed: SampleFailed, *, key: BatchKey, step: int) -> Fault:
        """See :meth:`Source.fault_of`."""
        return fault_of_failure(
            failed, rank=self.cut.rank, step=step, epoch=key.epoch, phase=self.phase
        )

    def repair_with(
        self, *, timeout_s: float, on_wait: Callable[[], None], kills: LoaderKills
    ) -> SampleRepair:
        """See :meth:`Source.repair_with`."""
        return SampleRepair(
            self._reader,
            quarantine=self._quarantine,
            timeout_s=timeout_s,
            on_wait=on_wait,
            kills=kills,
        )


def _micro_batches(read: Sequence[tuple[BatchKey, Any]]) -> list[MicroBatch]:
    return [MicroBatch(indices=key.indices, batch=batch) for key, batch in read]
