"""Streams of others as shards: from every position, through JSON, the items behind it come."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from ddp_runner.data.shard_adapters import HuggingFaceShards, StatefulShards
from ddp_runner.data.shard_wraps import Shuffled
from ddp_runner.data.shards import ShardPositions
from tests.data.sharded import Ranks, make, taken

NOT_HERE = "the extra {} is not installed here"


class Stateful:
    """Its state has what JSON has not; items depend on all of it."""

    def __init__(self, shard, length=11):
        self._shard, self._next, self._length = shard, 0, length
        self._generator = torch.Generator().manual_seed(shard)
        self._numpy = np.random.default_rng(shard)
        self._seen = {}

    def state_dict(self):
        return {
            "next": self._next,
            "torch": self._generator.get_state(),
            "numpy": self._numpy.bit_generator.state,
            "seen": self._seen,
            "pair": (b"\x00\xff", None),
        }

    def load_state_dict(self, state):
        assert state["pair"] == (b"\x00\xff", None)
        self._next, self._seen = state["next"], state["seen"]
        self._generator.set_state(state["torch"])
        self._numpy.bit_generator.state = state["numpy"]

    def __iter__(self):
        while self._next < self._length:
            self._next += 1
            self._seen[self._next] = self._next
            noise = torch.rand((), generator=self._generator).item() + self._numpy.random()
            yield (self._shard, self._next, noise, sum(self._seen))


def assert_goes_on_anywhere(stream, shard):
    whole = list(stream.read(shard, None))
    items = [item for item, _ in whole]
    for number, (_, position) in enumerate(whole, start=1):
        again = stream.read(shard, json.loads(json.dumps(position)))
        assert [item for item, _ in again] == items[number:]
    return items


@pytest.mark.parametrize("every", [1, 4, 100])
def test_what_has_a_state_goes_on_from_any_position(every):
    stream = StatefulShards(Stateful, shards=3, every=every)
    assert len(assert_goes_on_anywhere(stream, 2)) == 11
    with pytest.raises(ValueError, match="shards=0"):
        StatefulShards(Stateful, shards=0)


class Drawing:
    """Shuffled by a global generator as torch's samplers are, where it is begun; ``map`` draws for each item too."""

    def __init__(self, shard, length=11):
        self._order = random.sample(range(length), length)
        self._made = np.random.random()  # noqa: NPY002 - as a dataset may
        self._shard, self._next = shard, 0

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]

    def __iter__(self):
        flip = torch.rand(()).item()
        for place in self._order[self._next :]:
            self._next += 1
            yield (self._shard, place, self._made, flip, random.random())


@pytest.mark.parametrize("every", [1, 4, 100])
def test_what_a_shard_draws_at_its_beginning_it_draws_again(every):
    """From each step on, with workers and without; what it draws for an item follows from the item's seed."""
    stream = StatefulShards(Drawing, shards=3, every=every)
    whole = make(stream, batch=3)
    expected = [taken(whole, step) for step in range(20)]
    for said in (1, 2, 4, 7):
        positions = ShardPositions()
        first = make(stream, batch=3, positions=positions)
        for step in range(said):
            first.take(step)
        Ranks(1).do(lambda rank, one, at=said, loader=first: loader.gather(one, step=at))
        again = make(stream, batch=3, positions=positions, num_workers=1)
        try:
            assert [taken(again, step) for step in range(said, 20)] == expected[said:]
        finally:
            again.close()


def test_positions_of_older_checkpoints_have_no_seed():
    """They go on all the same, and have one from there on."""
    stream = StatefulShards(Stateful, shards=3, every=4)
    whole = list(stream.read(1, None))
    state, since, _ = whole[5][1]
    again = list(stream.read(1, [state, since]))
    assert [item for item, _ in again] == [item for item, _ in whole[6:]]
    assert all(len(position) == 3 for _, position in again)


class SharesItselfOut(Stateful):
    """As many datasets do in a worker of torch's DataLoader, where each shard would lose items."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for number, item in enumerate(super().__iter__()):
            if info is None or number % info.num_workers == info.id:
                yield item


def test_a_shard_is_read_whole_by_one_worker():
    """It is dealt to that worker already."""
    expected = make(StatefulShards(Stateful, shards=4))
    loader = make(StatefulShards(SharesItselfOut, shards=4), num_workers=2)
    try:
        assert [taken(loader, step) for step in range(9)] == [
            taken(expected, step) for step in range(9)
        ]
    finally:
        loader.close()


def test_a_dataset_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="list has no num_shards"):
        HuggingFaceShards([1, 2])


class Step:
    """A step of what ``datasets`` makes its iterable datasets of, by the names that it has there."""

    def __init__(self, **parts):
        vars(self).update(parts)


class MadeOf:
    """As ``datasets.IterableDataset``: made of steps."""

    num_shards = 2

    def __init__(self, step):
        self._ex_iterable = step

    def shard(self, num_shards, index):
        return self

    def state_dict(self):
        return {}


def test_a_shuffle_buffer_in_any_of_several_datasets_is_refused():
    """Interleaved and concatenated ones are made of several; control: without a buffer."""
    plain, shuffled = Step(), Step(ex_iterable=Step(), buffer_size=4)
    several = [plain, Step(ex_iterable=shuffled)]
    with pytest.raises(ValueError, match="has a shuffle buffer"):
        HuggingFaceShards(MadeOf(Step(ex_iterable=Step(ex_iterables=several))))
    HuggingFaceShards(MadeOf(Step(ex_iterable=Step(ex_iterables=[plain, Step(ex_iterable=plain)]))))


@pytest.fixture
def hugging_face(tmp_path, monkeypatch):
    """An iterable dataset over five JSONL files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets", reason=NOT_HERE.format("huggingface"))
    files = []
    for shard in range(5):
        path = tmp_path / f"{shard}.jsonl"
        lines = [json.dumps({"shard": shard, "n": n}) for n in range(7 + shard)]
        path.write_text("\n".join(lines))
        files.append(str(path))
    return datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "cache")
    )


@pytest.mark.filterwarnings("ignore")
def test_an_iterable_dataset_of_hugging_face_goes_on_from_any_position(hugging_face):
    """A file a shard, each item once, with what ``map`` makes of it."""
    stream = HuggingFaceShards(hugging_face.map(lambda item: {"twice": 2 * item["n"]}), every=3)
    assert stream.shards == 5
    found = [item for shard in range(5) for item in assert_goes_on_anywhere(stream, shard)]
    assert sorted((item["shard"], item["n"]) for item in found) == [
        (shard, n) for shard in range(5) for n in range(7 + shard)
    ]
    assert all(item["twice"] == 2 * item["n"] for item in found)


@pytest.mark.filterwarnings("ignore")
def test_workers_read_shards_of_hugging_face_whole(hugging_face):
    """In a loader's worker its own ``__iter__`` would share them out once more."""
    found = {}
    for workers in (0, 2):
        loader = make(HuggingFaceShards(hugging_face), num_workers=workers)
        try:
            steps = [loader.take(step) for step in range(12)]
        finally:
            loader.close()
        found[workers] = [item for step in steps for one in step for item in one.batch]
    assert found[0] == found[2]
    assert len({(item["shard"], item["n"]) for item in found[0]}) > 30


@pytest.mark.filterwarnings("ignore")
def test_a_shuffle_buffer_of_hugging_face_is_refused(hugging_face):
    """And what stands in its place goes on from any position."""
    with pytest.raises(ValueError, match=r"Shuffled\(HuggingFaceShards"):
        HuggingFaceShards(hugging_face.shuffle(seed=1, buffer_size=4).map(dict))
    datasets = pytest.importorskip("datasets")
    for several in (datasets.interleave_datasets, datasets.concatenate_datasets):
        HuggingFaceShards(several([hugging_face, hugging_face]))
        with pytest.raises(ValueError, match=r"Shuffled\(HuggingFaceShards"):
            HuggingFaceShards(several([hugging_face, hugging_face.shuffle(seed=1, buffer_size=4)]))
    random.seed(1)
    assert_goes_on_anywhere(Shuffled(HuggingFaceShards(hugging_face), size=4), 3)


@pytest.mark.filterwarnings("ignore")
def test_a_stateful_loader_of_torchdata_goes_on_from_any_position():
    """Shuffled by a generator that is part of its state; a batch is an item."""
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason=NOT_HERE.format("torchdata")
    )

    def made(shard):
        data = [(shard, n) for n in range(13)]
        return stateful.StatefulDataLoader(
            data,
            batch_size=2,
            shuffle=True,
            collate_fn=list,
            generator=torch.Generator().manual_seed(shard),
        )

    batches = assert_goes_on_anywhere(StatefulShards(made, shards=2, every=3), 1)
    items = [item for batch in batches for item in batch]
    assert sorted(items) == [(1, n) for n in range(13)] != items


@pytest.mark.filterwarnings("ignore")
def test_a_stateful_loader_of_torchdata_may_draw_its_own_order():
    """It has no generator of its own, so torch's."""
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason=NOT_HERE.format("torchdata")
    )

    def made(shard):
        return stateful.StatefulDataLoader(
            [(shard, n) for n in range(13)], batch_size=2, shuffle=True, collate_fn=list
        )

    batches = assert_goes_on_anywhere(StatefulShards(made, shards=2, every=3), 1)
    items = [item for batch in batches for item in batch]
    assert sorted(items) == [(1, n) for n in range(13)] != items


@pytest.mark.filterwarnings("ignore")
def test_nodes_of_torchdata_go_on_from_any_position():
    nodes = pytest.importorskip("torchdata.nodes", reason=NOT_HERE.format("torchdata"))

    def made(shard):
        source = nodes.IterableWrapper(range(10 * shard, 10 * shard + 10))
        return nodes.Loader(nodes.Batcher(source, batch_size=3, drop_last=False))

    assert assert_goes_on_anywhere(StatefulShards(made, shards=2, every=2), 1) == [
        *([10, 11, 12], [13, 14, 15], [16, 17, 18], [19])
    ]
