"""What a task measures: over any number of ranks, some without a sample, as one plain loop over all samples."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.training.figures.measuring import Meter, build_objects, measures

CPU = torch.device("cpu")
CLASSES = 4


class Confusion:
    """Counts, in a tensor that the first update makes; a constant beside it."""

    def __init__(self):
        self.classes = CLASSES
        self.edges = torch.linspace(0, 1, 5)
        self.counts = None

    def reset(self):
        self.counts = None

    def update(self, found, labels):
        if self.counts is None:
            self.counts = torch.zeros(self.classes, self.classes, dtype=torch.int64)
        self.counts.index_put_((found, labels), torch.ones_like(labels), accumulate=True)

    def compute(self):
        assert torch.equal(self.edges, torch.linspace(0, 1, 5))
        counts = self.counts.double()
        recall = counts.diag() / counts.sum(0)
        return {"recall": recall.mean(), "first": float(recall[0])}


class MeanScore(nn.Module):
    """Buffers, one of which does not begin at nothing; a number of Python's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("weight", torch.ones(()))  # as a prior
        self.batches = 0

    def reset(self):
        self.total.zero_()
        self.weight.fill_(1.0)
        self.batches = 0

    def update(self, scores):
        self.total += scores.sum()
        self.weight += len(scores)
        self.batches += 1

    def compute(self):
        return self.total / self.weight + 100 * self.batches


class Nested:
    """Has another one inside."""

    def __init__(self):
        self.inner = {"one": MeanScore()}

    def reset(self):
        self.inner["one"].reset()

    def update(self, scores):
        self.inner["one"].update(scores)

    def compute(self):
        return self.inner["one"].compute()


class Declaring:
    """As torchmetrics has it: it names its states, and would sum over ranks by itself."""

    def __init__(self, reduction="dim_zero_sum"):
        def reduce(values):
            return values

        reduce.__name__ = reduction
        self._reductions = {"hits": reduce}
        self.sync_on_compute = self._to_sync = True
        self.reset()

    def reset(self):
        self.hits, self._update_count, self._seen = torch.tensor(0), 0, []

    def update(self, found, labels):
        self._seen.append(found)  # no state of its own making
        self._update_count += 1
        self.hits = self.hits + (found == labels).sum()

    def compute(self):
        assert not self._to_sync
        return self.hits


class Ordered:
    """Declares states that are no sums: the largest and the smallest score, and the scores themselves."""

    def __init__(self):
        def dim_zero_max(values):
            return values.max(0).values

        def dim_zero_min(values):
            return values.min(0).values

        def dim_zero_cat(values):
            return torch.cat(values)

        self._reductions = {"top": dim_zero_max, "low": dim_zero_min, "scores": dim_zero_cat}
        self.reset()

    def reset(self):
        self.top, self.low, self.scores = torch.tensor(-math.inf), torch.tensor(math.inf), []

    def update(self, scores):
        self.top, self.low = torch.max(self.top, scores.max()), torch.min(self.low, scores.min())
        self.scores.append(scores)

    def compute(self):
        return {"top": self.top, "low": self.low, "median": torch.cat(self.scores).median()}


class Keeping(Confusion):
    """Keeps the samples themselves."""

    def __init__(self):
        super().__init__()
        self.scores = []

    def update(self, found, labels):
        self.scores.append(found)


class Slotted:
    """Counts, in slots."""

    __slots__ = ("samples",)

    def __init__(self):
        self.samples = 0

    def reset(self):
        self.samples = 0

    def update(self, found, labels):
        self.samples += len(labels)

    def compute(self):
        return self.samples


class Classifier:
    """The part of a task that is used here."""

    def __init__(self, **objects):
        self._objects = objects

    def build_metrics(self):
        return {name: kind() for name, kind in self._objects.items()}

    def metrics(self, model, batch):
        scores, labels = batch
        found = scores.argmax(1)
        given = {
            "accuracy": ((found == labels).sum(), len(labels)),
            "confusion": (found, labels),
            "score": scores[:, 0],
            "nested": scores[:, 0],
            "declaring": (found, labels),
            "ordered": scores[:, 0],
            "slotted": (found, labels),
        }
        return {
            name: one for name, one in given.items() if name == "accuracy" or name in self._objects
        }


KINDS = {
    "confusion": Confusion,
    "score": MeanScore,
    "nested": Nested,
    "declaring": Declaring,
    "ordered": Ordered,
    "slotted": Slotted,
}


def batches_of(samples, *, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(samples, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.arange(samples) % CLASSES
    return list(zip(scores.split(size), labels.split(size), strict=True)) if samples else []


class Ranks:
    """Threads that meet where ranks would."""

    def __init__(self, world):
        self._barrier = threading.Barrier(world, timeout=30)
        self._world, self._given = world, {}

    def of(self, rank):
        ranks = self

        class One:
            def __init__(self):
                self.rank = rank

            def exchange(self, name, value):
                return ranks.meet(rank, (name, value), lambda one: one[1])

            def sum_in_place(self, tensor):
                tensor.copy_(sum(ranks.meet(rank, tensor.clone(), lambda one: one)))

        return One()

    def meet(self, rank, value, read):
        self._given[rank] = value
        self._barrier.wait()
        found = [read(self._given[one]) for one in range(self._world)]
        self._barrier.wait()
        return found

    def run(self, work):
        """What ``work(rank, over)`` gives on each rank, or raises."""

        def safely(rank):
            try:
                return work(rank, self.of(rank))
            except FaultError as error:
                return error

        with ThreadPoolExecutor(self._world) as pool:
            return list(pool.map(safely, range(self._world)))


def measured(task, shards):
    """The figures on each rank, twice: nothing of the first evaluation is in the second."""
    meters = [
        Meter(task, build_objects(task, Settings(), CPU), device=CPU) for _ in range(len(shards))
    ]

    def work(rank, over):
        for _ in range(2):
            meters[rank].begin()
            for batch in shards[rank]:
                meters[rank].take(None, batch, samples=0 if batch is None else len(batch[0]))
            figures = meters[rank].figures(over)
        return figures

    return Ranks(len(shards)).run(work)


def by_hand(samples):
    """One loop over all samples."""
    scores = torch.cat([scores for scores, _ in batches_of(samples)])
    labels = torch.cat([labels for _, labels in batches_of(samples)])
    hits = scores.argmax(1) == labels
    recall = [float(hits[labels == one].double().mean()) for one in range(CLASSES)]
    batches = len(batches_of(samples))
    score = float(scores[:, 0].sum().float() / (1 + samples)) + 100 * batches
    return {
        "accuracy": float(hits.double().mean()),
        "confusion_recall": sum(recall) / CLASSES,
        "confusion_first": recall[0],
        "score": score,
        "nested": score,
        "declaring": float(hits.sum()),
        "slotted": samples,
        "ordered_top": float(scores[:, 0].max()),
        "ordered_low": float(scores[:, 0].min()),
        "ordered_median": float(scores[:, 0].median()),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("samples", [4, 7, 23])
def test_ranks_measure_what_one_plain_loop_does(world, samples):
    """Sums, tensors that are made late, buffers with a begin, numbers, slots; also where a rank has nothing."""
    batches = batches_of(samples)
    answers = measured(Classifier(**KINDS), [batches[rank::world] for rank in range(world)])
    assert all(one == answers[0] for one in answers)
    assert answers[0] == pytest.approx(by_hand(samples), rel=1e-6)
    exact = ("accuracy", "confusion_recall", "confusion_first", "declaring")
    assert {name: answers[0][name] for name in exact} == pytest.approx(
        {name: by_hand(samples)[name] for name in exact}, abs=1e-15
    )


def test_what_cannot_be_summed_ends_the_run_on_all_ranks():
    """Also on a rank without a sample; never a figure of one rank's samples alone."""
    task = Classifier(confusion=Keeping)
    words = r"'confusion' cannot be summed over ranks: scores, .* is a list"
    for error in measured(task, [batches_of(5), []]):
        with pytest.raises(FaultError, match=words):
            raise error
        assert not error.fault.may_retry


@pytest.mark.parametrize("world", [1, 3])
def test_metrics_of_torchmetrics_need_nothing_of_ours(world):
    """Sums, a largest value, and the scores of all samples, of its own classes; one rank has no sample."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Binary:
        def build_metrics(self):
            return {
                "exact": torchmetrics.classification.BinaryAUROC(),  # keeps each score
                "binned": torchmetrics.classification.BinaryAUROC(thresholds=20),
                "top": torchmetrics.MaxMetric(),
            }

        def metrics(self, model, batch):
            scores, labels = batch
            pair = (scores[:, 0], (labels % 2).long())
            return {"exact": pair, "binned": pair, "top": scores[:, 0]}

    batches = batches_of(23)
    shards = [batches] if world == 1 else [batches[::2], batches[1::2], []]
    answers = measured(Binary(), shards)
    alone = Binary().build_metrics()
    for batch in batches:
        for name, given in Binary().metrics(None, batch).items():
            alone[name].update(*(given if isinstance(given, tuple) else (given,)))
    expected = {name: float(one.compute()) for name, one in alone.items()}
    assert all(one == pytest.approx(expected, abs=1e-7) for one in answers)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "returned None"),
        ([1, 2], "returned a list, not"),
        ({"loss": (1, 1)}, "a figure named 'loss'"),
        ({"a/b": (1, 1)}, "a figure named 'a/b'"),
        ({"hits": "3"}, "for 'hits' a str, not"),
        ({"hits": (torch.ones(2), 1)}, r"tensor of shape \(2,\), no number"),
        ({"hits": ("many", 1)}, "'hits' is a str, no number"),
    ],
)
def test_what_a_task_may_not_give_is_named(given, words):
    """In one line, without another try."""

    class Wrong:
        def metrics(self, model, batch):
            return given

    meter = Meter(Wrong(), {}, device=CPU)
    meter.begin()
    with pytest.raises(FaultError, match=words) as error:
        meter.take(None, None, samples=1)
    assert not error.value.fault.may_retry


@pytest.mark.parametrize("kind", [float, torch.Tensor, np.float32])
@pytest.mark.parametrize("world", [1, 2])
def test_a_plain_number_counts_as_the_mean_of_its_batch(kind, world):
    """Batches of 4 and 1 samples: the figure is that of all 5, not the mean of two means."""

    class Means:
        def metrics(self, model, batch):
            scores, labels = batch
            mean = (scores.argmax(1) == labels).float().mean()
            return {"mean": mean if kind is torch.Tensor else kind(mean), "sum": (mean * 4, 4)}

    batches = [
        (torch.eye(CLASSES), torch.arange(CLASSES)),
        (torch.eye(CLASSES)[:1], torch.tensor([1])),
    ]
    for figures in measured(Means(), [batches[rank::world] for rank in range(world)]):
        assert figures == {"mean": 4 / 5, "sum": 4 / 8}


def test_nothing_that_counts_is_no_number():
    """A weight of 0 over all ranks gives NaN, not an error."""

    class Nothing:
        def metrics(self, model, batch):
            return {"hits": (0, 0)}

    (figures,) = measured(Nothing(), [[None]])
    assert math.isnan(figures["hits"])


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (SimpleNamespace(build_metrics=lambda: {"x": MeanScore()}), "no metrics"),
        (Classifier(confusion=dict), r"'confusion' a dict without reset\(\)"),
        (Classifier(loss=MeanScore), "has the name 'loss'"),
        (
            Classifier(declaring=lambda: Declaring("dim_zero_mean")),
            "'declaring': hits is to be put together by dim_zero_mean: only states that are summed",
        ),
        (SimpleNamespace(build_metrics=list, metrics=lambda m, b: {}), "returned a list"),
    ],
)
def test_objects_that_are_none_are_refused_at_the_start(task, words):
    """Before anything is trained."""
    with pytest.raises(BadInputError, match=words):
        build_objects(task, Settings(), CPU)


@pytest.mark.parametrize("own", [[1, 2], lambda self: None, None])
def test_something_else_called_metrics_is_left_alone(own):
    """A task's own list of that name, say, is as it always was."""

    class Own:
        metrics = own

    assert not measures(Own())
    assert not Meter(Own(), {}, device=CPU).is_on
