"""Checks that every rank, and every launch, trains on the same data.

A rank looks once at the length, at the first, middle and last sample and at the order. A sample that cannot
be examined (it raises, hangs or has an unknown type) is not compared: that is no fault.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddp_runner import config
from ddp_runner.checkpoint.store import Loaded
from ddp_runner.config.identity import task_has_changed
from ddp_runner.core.run_stages import is_first_generation
from ddp_runner.core.settings import JsonValue, Settings
from ddp_runner.data.loader import Loader
from ddp_runner.data.loader_faults import LoaderKills
from ddp_runner.data.stream import StreamOrder
from ddp_runner.data.workers.count import asked_workers, worker_count
from ddp_runner.data.workers.fetch import BatchKey, SampleFailed, SampleReader
from ddp_runner.data.workers.pool import PoolSettings, WorkerPool
from ddp_runner.data.workers.timeouts import BatchLateError, PoolError
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.processes.memory_limits import KernelKills
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.system.threads import cores_here
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import TuningChanged
from ddp_runner.training.state import TrainState
from ddp_runner.training.workload import TaskWorkload

# From when the samples begin to be loaded. A repair is not to be held up.
PATIENCE_S = 5.0
PATIENCE_OF_REPAIR_S = 1.0
LATER_S = 0.3  # for a sample in two epochs
OWN_RANDOMNESS = (
    "different when it is loaded again: its dataset has its own random generator, or reads the"
    " time; use the global generators, which are seeded for each sample"
)
OWN_MEMORY = (
    "different when other samples were loaded before it: its dataset remembers what it has loaded, and"
    " a replacement starts without that"
)
_COUNT, _ORDER = "samples", "order"
_SETTING = "data.compare_samples"

Record = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLook:
    """The facts that a rank has seen of its data; ``record``: the comparable ones, as plain values by name.

    ``unlike_itself``: a sample that differed when it was loaded again. ``unseen``: why
    samples are not compared, by name. ``later``: the hash of a sample as the second epoch has it.
    """

    record: Record
    later: str = ""
    unlike_itself: str = ""
    unseen: Mapping[str, str] = field(default_factory=dict)


class SameData:
    """One rank's look at its data; to be closed.

    With loader workers the samples are loaded by a worker: what a dataset opens when it is first
    asked must not be open in the rank when that forks its workers. At the start of a run one is forked
    for it, beside whatever the rank does; a replacement, for whom others wait, has the first workers of
    its loader do it. Without workers they are loaded here, at once.
    """

    def __init__(
        self,
        settings: Settings,
        workload: TaskWorkload,
        runtime: Runtime,
        *,
        on_wait: Callable[[], None],
        may_differ: Callable[[], bool] = lambda: False,
    ) -> None:
        """``may_differ``: returns True if training is known to have changed the data, which a replacement lacks."""
        self._settings = settings
        self._may_differ = may_differ
        self._workload = workload
        self._runtime = runtime
        self._on_wait = on_wait
        self._pool: WorkerPool | None = None
        self._look: DataLook | None = None
        self._hashes: dict[int, str] = {}
        self._unseen: dict[int, str] = {}
        self._unlike: int | None = None
        self._unlike_itself = ""  # of any rank
        self._later = ""  # see DataLook
        self.keeps_draws = False  # the dataset keeps what a sample has drawn in an epoch before
        self._has_reported = False
        self.record: Record = {}  # what the ranks have agreed on
        is_off = settings.data.compare_samples == "off"
        self._known = {} if is_off else _known_of(workload)
        if is_off or isinstance(workload.order, StreamOrder):
            self._look = DataLook(record=self._known)  # StreamWatch compares a stream's items
            return
        self._is_repair = runtime.slot.get(Cell.GENERATION) > 0
        self._samples = tuple(dict.fromkeys(_looked_at(workload.order.dataset_size)))
        # The first one once more; a replacement need not know that of its dataset where others do.
        again = () if self._is_repair and not runtime.rank_info.loads else self._samples[:1]
        self._left = [*map(_key, (*self._samples, *again)), *self._of_two_epochs()]  # in this order
        rank_info = runtime.rank_info
        self._has_workers = (
            worker_count(
                asked_workers(settings.data, local_rank=rank_info.local_rank),
                local_world_size=rank_info.local_world_size,
                cores=cores_here(),
            )
            > 0
        )
        if not self._has_workers or not self._is_repair or rank_info.loads:
            self._begin()

    def _of_two_epochs(self) -> list[BatchKey]:
        """Return loads of one more sample: odd ranks load it for the second epoch alone, even ranks for the first before."""
        order, rank_info = self._workload.order, self._runtime.rank_info
        index = order.dataset_size // 3
        has_epochs = self._workload.length.total_steps > order.steps_per_epoch
        if self._is_repair or not has_epochs or index in self._samples or rank_info.world_size == 1:
            return []
        return [_key(index), _key(index, epoch=1)][rank_info.rank % 2 :]

    def _begin(self) -> None:
        self._began_s = time.monotonic()
        dataset, seed = self._workload.datasets.train, self._settings.run.seed
        source = SampleReader(dataset, seed=seed, collate=list)
        if self._has_workers:
            self._start_worker(source)
        else:
            self._load_here(source)

    def _start_worker(self, source: SampleReader) -> None:
        # INVARIANT handles-in-workers: with loader workers no sample is loaded in the rank itself.
        # Broken if: the samples to compare are loaded here; workers would share what that has opened.
        # Guarded by: test_what_a_dataset_opens_is_opened_in_workers_only.
        keys = list(self._left)
        pool = PoolSettings(
            rank=self._runtime.rank_info.rank,
            workers=1,
            prefetch_factor=len(keys),
            pin_memory=False,
        )
        try:
            self._pool = WorkerPool(source, iter(keys), settings=pool)
        except PoolError as error:
            self._not_seen(str(error))

    def _load_here(self, source: SampleReader) -> None:
        slot = self._runtime.slot
        if slot.get(Cell.SAMPLE):  # the process before this one ended as it loaded that sample
            self._not_seen("a process ended as it loaded one")
            return
        patience_s = PATIENCE_OF_REPAIR_S if self._is_repair else PATIENCE_S
        for key in list(self._left):
            is_of_later = key.indices[0] not in self._samples
            if time.monotonic() > self._began_s + (LATER_S if is_of_later else patience_s):
                self._not_seen(f"not loaded within {patience_s:g} s")
                return
            slot.set(Cell.SAMPLE, key.indices[0] + 1)
            found = source.load_here(key)
            slot.set(Cell.SAMPLE, 0)
            self._seen(key, found)

    def look(self) -> DataLook:
        """Return what this rank has seen. Waits for it, seconds at most; a process looks once.

        Raises what ``on_wait`` raises.
        """
        if self._look is None:
            if self._left and self._pool is None:
                self._begin()
            try:
                self._collect()
            finally:
                self.close()
            self._look = self._concluded()
        return self._look

    def _collect(self) -> None:
        pool = self._pool
        if pool is None:
            return
        by_s = self._began_s + PATIENCE_S
        try:
            while self._left:
                left_s = max(0.0, by_s - time.monotonic())
                if self._left[0].indices[0] not in self._samples:
                    left_s = min(left_s, LATER_S)
                _, found = pool.next(timeout_s=left_s, on_wait=self._on_wait)
                self._seen(self._left[0], found)  # one worker gives them in their order
        except BatchLateError:
            self._not_seen(f"not loaded within {PATIENCE_S:g} s")
        except PoolError as error:
            if error.worker >= 0:
                # Claimed, so that nobody takes it for the end of a rank.
                LoaderKills(KernelKills()).has_killed(pool, error.worker)
            self._not_seen(str(error))

    def _seen(self, key: BatchKey, found: list[str] | SampleFailed) -> None:
        self._left.remove(key)
        index = key.indices[0]
        if index not in self._samples:
            self._later = "" if isinstance(found, SampleFailed) or key.epoch == 0 else found[0]
        elif isinstance(found, SampleFailed):
            self._unseen[index] = found.error
        elif not found[0]:
            self._unseen[index] = "it holds a type whose content is not known"
        elif index not in self._hashes:
            self._hashes[index] = found[0]
        elif self._hashes[index] != found[0]:
            self._unlike = index

    def _not_seen(self, why: str) -> None:
        left = [key.indices[0] for key in self._left]
        self._unseen |= {
            index: why for index in left if index in {*self._samples} - {*self._hashes}
        }
        self._left.clear()

    def _concluded(self) -> DataLook:
        unseen = {_named(index): why for index, why in self._unseen.items()}
        if self._unlike is not None:
            return DataLook(record=self._known, unlike_itself=_named(self._unlike), unseen=unseen)
        hashes = {_named(index): one for index, one in sorted(self._hashes.items())}
        return DataLook(record={**self._known, **hashes}, unseen=unseen, later=self._later)

    def close(self) -> None:
        """End the worker that loads. May be called again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.end(grace_s=0.0)

    def compare(self, group: Group, loader: Loader) -> None:
        """Hold what every rank of ``group`` has seen against each other; all must call it.

        Whoever has not looked yet is given what the others have seen, and holds its own against that
        when ``loader`` gives it its first batch. Raises BadInputError where it differs, if that is not
        only to be reported.
        """
        is_first = is_first_generation(group.membership.generation, self._settings.stage)
        answers = self._exchange(group, looks=is_first)
        if not any(has_looked for *_, has_looked in answers):
            answers = self._exchange(group, looks=True)
        self._unlike_itself = next((name for _, _, name, *_ in answers if name), "")
        records: dict[int, Record] = {
            rank: _without_samples(record) if self._unlike_itself else record
            for rank, record, *_ in answers
        }
        self.record, odd = agreed(records)
        # INVARIANT loaded-as-never-before: a sample does not depend on whether an earlier epoch has loaded it.
        # Broken if: its dataset keeps what it has drawn: a new process draws again, and nobody compares.
        # Guarded by: test_what_a_new_process_of_the_data_lacks_is_named.
        later = {text for *_, text, _ in answers if text}
        self.keeps_draws = len(later) > 1 and not self._unlike_itself and not odd
        if group.rank == 0 and not self._has_reported:
            self._report_unlike(is_first=is_first)
        self._has_reported = True
        if odd:
            self._differs(odd, is_first=is_first, reports=group.rank == 0)
        if self._look is None:
            samples = [index for index in self._samples if _named(index) in self.record]
            if samples:
                loader.look_at([_key(index) for index in samples], self._seen_by_loader)
            else:
                self._look = DataLook(record=self._known, unlike_itself=self._unlike_itself)

    def _exchange(self, group: Group, *, looks: bool) -> list[tuple[int, Record, str, str, bool]]:
        look = self.look() if looks or self._pool is not None else self._look
        found = DataLook(record=self._known) if look is None else look
        rank = self._runtime.rank_info.rank
        mine = json.dumps([rank, found.record, found.unlike_itself, found.later, look is not None])
        return [tuple(json.loads(answer)) for answer in group.exchange("data", mine)]

    def _seen_by_loader(self, found: Mapping[int, list[str] | SampleFailed]) -> None:
        """Use what a replacement's workers have seen before its first batch."""
        if not self._left:
            return  # a look of the ranks together came before it
        for key in [key for key in self._left if key.indices[0] in found]:
            self._seen(key, found[key.indices[0]])
        self._left.clear()
        self._look = replace(self._concluded(), unlike_itself=self._unlike_itself)
        if not differences(self.record, self._look.record):
            return
        by_loader, self._look = self._look.record, self._seen_in_one_worker()
        if lines := differences(self.record, self._look.record):
            self._differs({self._runtime.rank_info.rank: lines}, is_first=False, reports=True)
            return
        odd = [name for name, one in by_loader.items() if self.record.get(name, one) != one]
        self._runtime.logger.warning(f"{odd[0]} is {OWN_MEMORY}")
        self._report_inexact(f"{odd[0]} is {OWN_MEMORY}")

    def _seen_in_one_worker(self) -> DataLook:
        """The samples once more, in the order in which they were loaded at the start of the run."""
        self._hashes, self._unseen, self._unlike = {}, {}, None
        self._left = [*map(_key, self._samples)]
        self._begin()
        try:
            self._collect()
        finally:
            self.close()
        return replace(self._concluded(), unlike_itself=self._unlike_itself)

    def _differs(self, odd: Mapping[int, Sequence[str]], *, is_first: bool, reports: bool) -> None:
        line = _line_of(odd)
        if self._settings.data.compare_samples == "stop" and not self._may_differ():
            raise BadInputError("--task", self._settings.run.task, _refusal(line, is_first))
        if reports:
            self._runtime.logger.warning(line)
            self._report_inexact(line)

    def _report_unlike(self, *, is_first: bool) -> None:
        unlike = self._unlike_itself
        if unlike:
            self._report_inexact(f"{unlike} is {OWN_RANDOMNESS}")
        if not is_first or self._look is None:
            return  # the rank 0 before has said it
        if unlike:
            self._runtime.logger.warning(f"{unlike} is {OWN_RANDOMNESS}")
        for name, why in self._look.unseen.items():
            self._runtime.logger.info(f"{name} is not compared between ranks and launches: {why}")

    def _report_inexact(self, reason: str) -> None:
        self._runtime.report(
            TuningChanged(
                rank=self._runtime.rank_info.rank,
                step=max(0, self._runtime.slot.get(Cell.COMMITTED_STEP)),
                action="",
                inexact_reason=reason,
                fault_free=True,
            )
        )

    def compare_with(self, loaded: Loaded, workload: TaskWorkload, state: TrainState) -> None:
        """Hold what this rank has seen against what the run of a checkpoint was trained on.

        Raises BadInputError where it differs, if that is not only to be reported: then ``state`` keeps it
        as a change. A file of before this was written has nothing to compare.
        """
        before = loaded.manifest.data
        if not before or not 0 < state.committed_step < workload.length.total_steps:
            return
        word, step = self._settings.data.compare_samples, state.committed_step
        if word == "off":
            line = f"the data is not compared with that of before step {step} ({_SETTING}=off)"
            state.changes = (*state.changes, line)
            return
        look = self.look()
        record = _without_samples(before) if look.unlike_itself else before
        found = differences(record, look.record)
        if not found:
            return
        what = _listed(found)
        if word == "tell":
            state.changes = (*state.changes, f"other data from step {step} on: {what}")
            return
        raise BadInputError(
            *config.resume_as_given(self._settings.run.resume),
            f"{loaded.path} was trained on other data: {what}; likely cause: "
            f"{_cause_since(loaded, workload)}; {config.ways_on_with_data(self._settings)}",
        )


def agreed(records: Mapping[int, Record]) -> tuple[Record, dict[int, list[str]]]:
    """Return the values that most ranks have, and each other rank's differences from them.

    ``records`` are by rank; among equally frequent values the lowest rank's counts.
    """
    names = dict.fromkeys(name for record in records.values() for name in record)
    common: dict[str, JsonValue] = {}
    for name in names:
        values = [record[name] for record in records.values() if name in record]
        common[name] = Counter(map(json.dumps, values)).most_common(1)[0][0]
        common[name] = json.loads(str(common[name]))
    found = {rank: differences(common, record) for rank, record in records.items()}
    odd = {rank: lines for rank, lines in found.items() if lines}
    if odd:
        common = {name: value for name, value in common.items() if not name.startswith("sample ")}
    return common, odd


def differences(one: Record, other: Record) -> list[str]:
    """Return the differences of ``other`` from ``one``, in words; a name in only one of them is not compared."""
    if {_COUNT} <= one.keys() & other.keys() and one[_COUNT] != other[_COUNT]:
        return [f"{other[_COUNT]} samples instead of {one[_COUNT]}"]
    found = []
    orders = [str(record.get(_ORDER, "")).partition(":") for record in (one, other)]
    if orders[0][0] == orders[1][0] and orders[0] != orders[1]:  # of one version
        found.append("another order of the samples")
    names = [name for name in one if name.startswith("sample ") and name in other]
    changed = [name for name in names if one[name] != other[name]]
    if len(changed) == 1:
        found.append(f"{changed[0]} is another one")
    elif changed:
        indices = [name.removeprefix("sample ") for name in changed]
        found.append(f"samples {', '.join(indices[:-1])} and {indices[-1]} are other ones")
    return found


def _known_of(workload: TaskWorkload) -> dict[str, JsonValue]:
    """Return the facts about the data that are known without loading a sample."""
    order = workload.order
    known: dict[str, JsonValue] = {}
    if hasattr(workload.datasets.train, "__len__"):
        known[_COUNT] = order.dataset_size
    if not isinstance(order, StreamOrder):
        first = order.first_step
        steps = (first, first + order.steps_per_epoch)
        taken = b"".join(order.indices(step).tobytes() for step in steps)
        known[_ORDER] = f"{order.version}:{hashlib.sha256(taken).hexdigest()[:16]}"
    return known


def _looked_at(count: int) -> tuple[int, int, int]:
    return 0, count // 2, count - 1


def _key(index: int, *, epoch: int = 0) -> BatchKey:
    return BatchKey(epoch=epoch, indices=(index,), hashed=True)


def _named(index: int) -> str:
    return f"sample {index}"


def _without_samples(record: Record) -> Record:
    return {name: value for name, value in record.items() if not name.startswith("sample ")}


def _listed(lines: Sequence[str]) -> str:
    return ", and ".join(lines)


def _line_of(odd: Mapping[int, Sequence[str]]) -> str:
    """Return a line on the ranks with other data; ranks that differ in the same way are named together."""
    ways: dict[str, list[int]] = {}
    for rank, lines in odd.items():
        ways.setdefault(_listed(lines), []).append(rank)
    return "; ".join(
        f"{_ranks(ranks)} other data than the other ranks: {what}" for what, ranks in ways.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} have"


def _refusal(line: str, is_first: bool) -> str:
    changed = "a file that has changed since the run began, samples that use what a loss changes, "
    changed = "" if is_first else changed
    return (
        f"{line}; likely cause: {changed}an order that differs between processes (of os.listdir or"
        " glob without sorted(), or of a set), random numbers from os.urandom, secrets or the time,"
        f" or other files on another machine ({_SETTING}=tell goes on all the same)"
    )


def _cause_since(loaded: Loaded, workload: TaskWorkload) -> str:
    """Why the data may be another since the checkpoint was written, the likeliest first."""
    old, new = loaded.manifest.recipe, workload.recipe
    causes = ["a file that has changed"]
    if task_has_changed(old, new):
        causes.insert(0, "the task's file, which has changed")
    if old.get("torch", new["torch"]) != new["torch"]:
        causes.append(f"torch {new['torch']} instead of {old['torch']}")
    causes.append("an order or random numbers that differ between launches")
    return ", ".join(causes[:-1]) + " or " + causes[-1]
