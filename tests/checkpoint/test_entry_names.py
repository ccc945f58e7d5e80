"""Names in files are those of the bare model, whoever wrote them and whoever reads them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.entry_names import (
    bare_name,
    bare_names,
    bare_state,
    live_name,
    load_bare_state,
    read_as,
    read_under,
)


class Wrapper(nn.Module):
    """As people write it: its only child is called ``module``."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)


def compiled(model):
    return torch.compile(model, backend="eager")


def plain(mark):
    torch.manual_seed(mark)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))


def compiled_inside(mark):
    model = plain(mark)
    model[2] = compiled(model[2])
    return model


FORMS = {
    "plain": plain,
    "compiled": lambda mark: compiled(plain(mark)),
    "compiled inside": compiled_inside,
    "compiled inside and out": lambda mark: compiled(compiled_inside(mark)),
}
WRAPPED = {
    "wrapped": lambda mark: Wrapper(plain(mark)),
    "wrapped twice": lambda mark: Wrapper(Wrapper(plain(mark))),
}
# What torch wraps around a wrapper is no part of the name, the wrapper is.
WRAPPED_AND_COMPILED = {
    "wrapped, then compiled": lambda mark: compiled(Wrapper(plain(mark))),
    "compiled, then wrapped": lambda mark: Wrapper(compiled(plain(mark))),
    "compiled, wrapped, compiled": lambda mark: compiled(Wrapper(compiled(plain(mark)))),
}
EVERY = {**FORMS, **WRAPPED, **WRAPPED_AND_COMPILED}


def values(model):
    """The tensors in the order of the modules, which wrappers do not change."""
    return list(model.state_dict().values())


def as_saved_before(model):
    """What files of earlier versions hold: the names as the live model has them."""
    return dict(model.state_dict())


def as_ddp_saves(model):
    """What a loop of the user's own saves that does not unwrap its DDP."""
    return {f"module.{name}": value for name, value in model.state_dict().items()}


def as_compiled_ddp_saves(model):
    return {f"_orig_mod.module.{name}": value for name, value in model.state_dict().items()}


SAVES = (bare_state, as_saved_before, as_ddp_saves, as_compiled_ddp_saves)


@pytest.mark.parametrize("source", EVERY)
def test_every_form_of_a_model_loads_from_every_other(source):
    """Every tensor arrives at its place, also where a wrapper was added or left out since."""
    saving = EVERY[source](1)
    for target, save in itertools.product(EVERY, SAVES):
        loading = EVERY[target](2)
        read = read_as(save(saving), bare_state(loading))
        assert list(read) == list(bare_state(loading)), (target, save)
        load_bare_state(loading, read)
        for theirs, ours in zip(values(saving), values(loading), strict=True):
            assert torch.equal(theirs, ours), (target, save)


@pytest.mark.parametrize("form", FORMS)
def test_no_wrapper_of_torch_is_in_a_name(form):
    """Compiled anywhere, a model has the names that it has without."""
    assert list(bare_state(FORMS[form](1))) == list(plain(1).state_dict())


@pytest.mark.parametrize(
    ("form", "prefix"),
    [
        ("wrapped", "module."),
        ("wrapped twice", "module.module."),
        *((form, "module.") for form in WRAPPED_AND_COMPILED),
    ],
)
def test_a_wrapper_of_the_users_own_stays_part_of_the_name(form, prefix):
    """It is the user's model, whatever its child is called."""
    expected = [prefix + name for name in plain(1).state_dict()]
    assert list(bare_state(EVERY[form](1))) == expected


def test_the_wrapper_of_ddp_is_known_by_its_class():
    """Not by the name of its child; it needs no process group for that."""
    model = plain(1)
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.module = model
    assert list(bare_state(ddp)) == list(model.state_dict())
    assert live_name(ddp, "0.weight") == "module.0.weight"


def test_a_part_of_the_users_own_keeps_whatever_name_it_has():
    """``_orig_mod`` and ``module`` are names like others where torch has not wrapped anything."""
    model = nn.ModuleDict({"module": nn.Linear(1, 1), "my_orig_mod": nn.Linear(1, 1)})
    model.add_module("_orig_mod", nn.Linear(1, 1))
    assert list(bare_state(model)) == list(model.state_dict())
    read = read_as(dict(model.state_dict()), bare_state(model))
    assert list(read) == list(model.state_dict())
    compiled_state = bare_state(compiled(model))
    assert list(compiled_state) == list(model.state_dict())


@pytest.mark.parametrize("form", EVERY)
def test_names_go_both_ways(form):
    """The live name of a bare one is the one that it came from."""
    model = EVERY[form](1)
    for name in model.state_dict():
        assert live_name(model, bare_name(model, name)) == name


def test_what_stands_beside_a_wrapped_child_does_not_move_others():
    """A file with an entry more than the model has now, such as a buffer filled late."""
    model = Wrapper(plain(1))
    saved = {**bare_state(model), "late": torch.ones(1)}
    assert list(read_as(saved, bare_state(model))) == list(saved)


def test_entries_that_would_become_one_stay_apart():
    """Nothing is overwritten in silence: the names are compared as they stand, and differ."""
    saved = {"w": torch.ones(1), "_orig_mod.w": torch.zeros(1)}
    assert read_as(saved, ["w"]) == saved
    assert read_as({}, ["w"]) == {}


@pytest.mark.parametrize(
    ("found", "wanted", "read", "prefix"),
    [
        ("w b", "net.w net.b head.w", "net.w net.b", "net."),
        ("w b", "left.w left.b right.w right.b", "w b", ""),  # which of the two nobody knows
        ("a.x.w", "w", "w", "a.x."),
        ("a._orig_mod.w a.v", "w v", "w v", "a."),
        ("a.w w", "w", "a.w w", ""),  # names that stand for themselves
        ("a.w b.w", "w", "a.w b.w", ""),
        ("module.w", "w", "w", ""),
    ],
)
def test_names_are_read_under_one_prefix(found, wanted, read, prefix):
    """Where no name stands for itself, and one prefix alone makes them fit."""
    names, said = read_under(dict.fromkeys(found.split(), 0), wanted.split())
    assert list(names) == read.split()
    assert said.count(f"'{prefix}'") == bool(prefix)
    assert bool(said) is bool(prefix)


def test_versions_of_modules_are_named_alike():
    """What torch keeps of each module's version goes by the same names."""
    model = compiled(plain(1))
    assert bare_state(model)._metadata["1"] == {"version": 2}


@pytest.mark.parametrize("form", [*FORMS, *WRAPPED, *WRAPPED_AND_COMPILED])
def test_many_names_are_those_that_each_has_alone(form):
    """Also where no look at each is needed: a model without any of torch's wrappers."""
    model = {**FORMS, **WRAPPED, **WRAPPED_AND_COMPILED}[form](1)
    names = [name for name, _ in model.named_parameters()]
    assert list(map(bare_names(model), names)) == [bare_name(model, name) for name in names]
