"""What functions between the steps of a loop draw, whatever their process has done before."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddp_runner.training.own_loop.between_steps import BetweenSteps
from ddp_runner.values.generators import seed_host
from tests.training.test_own_loop import own_batches


@pytest.fixture(autouse=True)
def workers_end():
    """Workers end with their test: the garbage collector would wait 5 s for each, as it frees their queues first."""
    yield
    for loader in [one for one in gc.get_objects() if issubclass(type(one), DataLoader)]:
        for name in [
            key for key, one in vars(loader).items() if isinstance(one, _BaseDataLoaderIter)
        ]:
            object.__setattr__(loader, name, None)


class Samples(Dataset):
    """Each has random numbers of torch's, and the count of loads where ``counts``."""

    def __init__(self, *, counts=False, own=False):
        self.counts, self.loads = counts, 0
        self.random = np.random.default_rng(1) if own else None

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.loads += self.counts
        return index + torch.rand(()) + (0 if self.random is None else self.random.random())


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


LOADERS = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "own generator": {"shuffle": True, "generator": seeded},
    "workers": {"num_workers": 2},
    "workers that stay": {"num_workers": 2, "persistent_workers": True},
    "all": {"shuffle": True, "num_workers": 2, "persistent_workers": True, "generator": seeded},
}


class Process:
    """A program as it has been started: a loader, and evaluations with it."""

    def __init__(self, *, data=None, **options):
        self.named = []
        self.between = BetweenSteps(seed=7, rank=0, is_kept=lambda _: False, note=self.named.extend)
        made = {key: one() if callable(one) else one for key, one in options.items()}
        self.loader = DataLoader(data or Samples(), batch_size=2, **made)

    def evaluated(self, step, passes=1):
        with self.between.drawing(step):
            return [torch.cat(list(self.loader)).tolist() for _ in range(passes)]


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_a_new_process_draws_what_an_old_one_draws(options):
    """Control: another step draws other numbers, and a second pass of one function, too."""
    old, new = Process(**options), Process(**options)
    first = old.evaluated(10)
    assert old.evaluated(20, passes=2) == new.evaluated(20, passes=2)
    assert first != new.evaluated(20)
    assert len({tuple(one) for one in new.evaluated(30, passes=2)}) == 2
    assert old.named == []


def test_a_generator_is_given_back_as_it_was():
    """Training may draw from it, too: as if nothing had been evaluated."""
    generator = seeded()
    process = Process(shuffle=True, generator=lambda: generator)
    torch.rand(3, generator=generator)
    before = generator.get_state()
    process.evaluated(10)
    assert torch.equal(generator.get_state(), before)
    assert generator.initial_seed() == 5


def test_a_seed_that_the_function_gives_a_generator_counts():
    """Whatever the process has evaluated before: by a seed of each evaluation, or by one of all."""
    for seed_of in (lambda step: step, lambda _: 3):
        seen = []
        for steps in ((10, 20, 30), (30,)):
            generator = seeded()
            process = Process(shuffle=True, generator=lambda one=generator: one)
            for step in steps:
                generator.manual_seed(seed_of(step))
                drawn = process.evaluated(step)
            seen.append(drawn)
        assert seen[0] == seen[1]


def test_a_loader_that_the_function_makes_is_left_as_it_is():
    """One with a fixed seed is meant to give the same in each evaluation."""
    process, seen = Process(), []
    for step in (10, 20):
        with process.between.drawing(step):
            made = DataLoader(range(100), shuffle=True, generator=seeded())
            seen.append([int(one) for one in made])
    assert seen[0] == seen[1]


def test_a_loader_of_an_earlier_call_begins_as_it_was_made():
    """A new process makes it in its first call. Control: what another call drew from it is over."""

    class Lazy(Process):
        loader = None

        def __init__(self):
            super().__init__()
            self.loader = None

        def evaluated(self, step, passes=1):
            with self.between.drawing(step):
                if self.loader is None:
                    self.loader = DataLoader(Samples(), shuffle=True, generator=seeded())
                return [torch.cat(list(self.loader)).tolist() for _ in range(passes)]

    old, new = Lazy(), Lazy()
    old.evaluated(10)
    assert old.evaluated(20, passes=2) == new.evaluated(20, passes=2)
    assert old.evaluated(30) == new.evaluated(30)


class KeepsIterator(DataLoader):
    """As some have it, so that workers stay without ``persistent_workers``."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Again:
    """The batches of a sampler, over and over."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_a_loader_that_keeps_its_iterator_begins_with_a_new_one(options):
    """In a function between steps, and at each epoch of the steps."""
    made = [{key: one() if callable(one) else one for key, one in options.items()} for _ in "on"]
    old, new = (KeepsIterator(Samples(), batch_size=2, **one) for one in made)

    def seen(loader, between, *steps):
        def evaluate():
            return torch.cat(list(loader)).tolist()

        for step in steps:
            with between.drawing(step, evaluate):
                found = evaluate()
        return found

    named = []
    between = [
        BetweenSteps(seed=7, rank=0, is_kept=lambda _: False, note=named.extend) for _ in "on"
    ]
    assert seen(old, between[0], 10, 20) == seen(new, between[1], 20)
    early, late = (own_batches(one) for one in (old, new))
    drawn = [early.take(step)[0] for step in range(6)]
    assert torch.equal(late.take(4)[0], drawn[4])
    assert named == []


class Pairs:
    """Of two loaders, as for labels that only some samples have."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        return zip(*self.loaders, strict=True)

    def __len__(self):
        return len(self.loaders[0])


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_the_loop_s_other_passes_begin_alike_in_each_process(options):
    """Those over loaders within the batches, and those that the loop's own code makes at a step."""

    def seen(*steps):
        process, inner = Process(**options), Process(**options)
        batches = own_batches(Pairs(inner.loader, process.loader))
        with process.between.around_loop(batches, run := SimpleNamespace(step_number=0)):
            for run.step_number in steps:
                drawn = batches.take(run.step_number)
                seed_host(run.step_number)
                judged = torch.cat(list(process.loader)).tolist()
        return [one.tolist() for one in drawn[0]], judged

    assert seen(0, 1, 2, 3, 4, 5, 6, 7) == seen(7)
    assert seen(2)[1] != seen(7)[1]


def test_data_that_the_loop_s_own_passes_change_is_named():
    """From the second pass on; control: data that does not change."""
    for data, names in (
        (Samples(own=True), ["`dataset.random` of an evaluation"]),
        (Samples(), []),
    ):
        process = Process(data=data, shuffle=True, generator=seeded)
        batches = own_batches(Process().loader)
        with process.between.around_loop(batches, run := SimpleNamespace(step_number=0)):
            for run.step_number in range(3):
                list(process.loader)
        assert process.named == names


DATA = Samples(counts=True)
SOME = Subset(DATA, range(3))


class Trainer:
    """Holds its data, in a dict."""

    def __init__(self):
        self.data = {"test": Samples(counts=True)}

    @torch.no_grad()
    def evaluate(self):
        """Go through it by number."""
        return sum(self.judge(self.data["test"][n]) for n in range(3))

    def judge(self, sample):
        """Give a number for a sample."""
        return float(sample)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda: DATA[0], ["`DATA.loads` of an evaluation"]),
        (lambda: [*DataLoader(SOME, batch_size=None)], ["`DATA.loads` of an evaluation"]),
        (Trainer().evaluate, ["`self.data['test'].loads` of an evaluation"]),
        (lambda: Samples(counts=True)[0], []),
        (lambda: [*DataLoader(Samples(counts=True))], []),
        (lambda: len(DATA), []),
    ],
    ids=["by number", "a new loader", "a method", "its own", "its own loader", "unchanged"],
)
def test_data_that_a_function_reaches_by_its_names_is_looked_at(function, names):
    """Also where no DataLoader, or one of the function's own, gives it."""
    named = []
    between = BetweenSteps(seed=7, rank=0, is_kept=lambda _: False, note=named.extend)
    with between.drawing(10, function):
        function()
    assert [one.replace("SOME.dataset", "DATA") for one in named] == names


class Unaskable:
    """Raises whatever it is asked."""

    def __getattribute__(self, name):
        raise ValueError(name)


class Compiled:
    """A class as that of a compiled module: ``__wrapped__`` is no function."""

    def __call__(self):
        return DATA[1]


def compiled():
    """As torch.compile leaves a function that calls a module."""


compiled.__wrapped__ = Compiled()


@pytest.mark.parametrize("make", [Unaskable, lambda: compiled], ids=["unaskable", "compiled"])
def test_what_cannot_be_looked_into_breaks_no_evaluation(make):
    """It is called as it would be without a look; other data is still looked at."""
    named, held = [], [make()]
    between = BetweenSteps(seed=7, rank=0, is_kept=lambda _: False, note=named.extend)

    def evaluate():
        return held, DATA[0]

    with between.drawing(10, evaluate):
        assert len(evaluate()) == 2
    assert named == ["`DATA.loads` of an evaluation"]


def test_data_that_an_evaluation_changes_is_named():
    """A new process lacks what earlier ones have changed; control: in workers, which are new each time, nothing is."""
    for data, name in (
        (Samples(counts=True), "`dataset.loads` of an evaluation"),
        (Samples(own=True), "`dataset.random` of an evaluation"),
    ):
        process = Process(data=data)
        process.evaluated(10)
        assert process.named == [name]
    process = Process(data=Samples(counts=True), num_workers=1, persistent_workers=True)
    process.evaluated(10)
    assert process.named == []


def test_an_evaluation_that_fails_leaves_no_trace():
    """DataLoaders of the program's are torch's own again, and a generator as it was."""
    begin, make, generator = DataLoader.__iter__, DataLoader.__init__, seeded()
    process = Process(shuffle=True, generator=lambda: generator)
    before = generator.get_state()

    def fail():
        next(iter(process.loader))
        raise KeyError

    with pytest.raises(KeyError), process.between.drawing(10):
        fail()
    assert (DataLoader.__iter__, DataLoader.__init__) == (begin, make)
    assert torch.equal(generator.get_state(), before)
