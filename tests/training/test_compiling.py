"""Compiling for a run: what is the same in every process, what stands on the board, what is left in the cache."""

from __future__ import annotations

import contextlib
import functools
import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_runner.config import check_relations, from_flat
from ddp_runner.core.settings import RunSettings
from ddp_runner.kernel.rules.classify import classify_error
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.training.components.recompute import checkpoint_activations, compiled_parts
from ddp_runner.training.starting.compiling import GRAPHS_MAX, Compiler, why_kernels_vary
from ddp_runner.values.generators import seed_all, seed_step
from tests.processes import run_ranks
from tests.scenarios.layered import Layered

from .building import make_slot

FEW = 8  # graphs, where so many as a run may have would take seconds


def _compiler(folder, model=None):
    slot = make_slot()
    slot.stamp(Phase.FORWARD, 1)
    settings = RunSettings(compile=True, log_dir=str(folder))
    return Compiler(settings, model or nn.Linear(2, 2), slot=slot), slot


def _shapes_and_phases(_me, folder):
    _, slot = _compiler(folder)
    limits = importlib.import_module("torch._dynamo.config")
    name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"
    limit = getattr(limits, name)
    setattr(limits, name, FEW)
    seen = []

    def backend(graph, inputs):
        sizes = [tuple(getattr(one, "shape", ())) for one in inputs]  # a dynamic size has none
        seen.append((Phase(slot.get(Cell.PHASE)), sizes))
        return graph.forward

    def double(inputs):
        return inputs * 2

    compiled = torch.compile(double, backend=backend)
    phases = []
    for size in (3, 4, 5, 3, 4):
        compiled(torch.ones(size, 2))
        phases.append(Phase(slot.get(Cell.PHASE)))

    def meet_more():
        for size in range(2, FEW + 10):
            compiled(torch.ones(size, 2))

    with pytest.raises(Exception, match=r"(recompile|cache_size)_limit") as caught:
        meet_more()
    error, text = type(caught.value).__name__, str(caught.value)
    kind = classify_error(type_name=error, text=text, aborted=False)
    return limit, seen[:3], len(seen), phases, kind


def test_each_shape_has_code_of_its_own_until_there_are_too_many(tmp_path):
    """No shape becomes dynamic by what was met before, and none is silently left uncompiled."""
    (found,) = run_ranks(_shapes_and_phases, 1, str(tmp_path))
    limit, seen, count, phases, kind = found
    assert limit == GRAPHS_MAX
    assert [shapes for _, shapes in seen] == [[(size, 2)] for size in (3, 4, 5)]
    assert {phase for phase, _ in seen} == {Phase.COMPILE}, "it is given the time for it"
    assert set(phases) == {Phase.FORWARD}, "and goes on where it was"
    assert count == FEW
    assert kind is FaultKind.COMPILATION_FAILED


class _TwoBuckets(nn.Module):
    """A model whose first layer fills a bucket of 1 MB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def _graphs_of_two_buckets(_me, folder):
    _compiler(folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    model = _TwoBuckets()
    model.compile(backend=backend)
    replica = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    for _ in range(2):  # DDP lays its buckets out again after the first
        replica(torch.ones(1, 512)).sum().backward()
    return len(graphs)


def test_a_compiled_model_is_not_cut_where_buckets_end(tmp_path):
    """A survivor compiled before DDP laid its buckets out again, and its replacement after."""
    assert run_ranks(_graphs_of_two_buckets, 1, str(tmp_path)) == [1]


class _Own(nn.Sequential):
    """A class of the user's, of which torch compiles the calls."""

    def forward(self, inputs):
        return super().forward(inputs)


def _graphs_by_kind(_me, folder):
    found = []

    def backend(graph, _inputs):
        found[-1] += 1
        return graph.forward

    torch.compile = functools.partial(torch.compile, backend=backend)
    for kind in (_Own, nn.Sequential):
        found.append(0)
        model = kind(nn.Linear(2, 3), nn.Linear(3, 2))
        compiler, _ = _compiler(folder, model)
        compiler.turn(on=True)
        model(torch.ones(1, 2))
    return found


def test_a_model_of_torch_s_own_class_is_compiled_too(tmp_path):
    """``nn.Sequential(...).compile()`` compiles nothing, and says nothing."""
    assert run_ranks(_graphs_by_kind, 1, str(tmp_path)) == [[1, 1]]


def _turned(_me, folder):
    model = nn.Sequential(nn.Linear(2, 2))
    names = list(model.state_dict())
    compiler, _ = _compiler(folder, model)
    found = [model._compiled_call_impl is not None]
    compiler.turn(on=True)
    call = model._compiled_call_impl
    with compiler.aside():
        found.append(model._compiled_call_impl is not None)
        model(torch.ones(1, 2))
    found.append(model._compiled_call_impl is call)
    compiler.turn(on=False)
    return found, list(model.state_dict()) == names


def test_names_stay_and_evaluations_are_not_compiled(tmp_path):
    """It is off until a generation turns it on, aside in evaluations, and the same call after them."""
    assert run_ranks(_turned, 1, str(tmp_path)) == [([False, False, True], True)]
    model = nn.Linear(2, 2)
    off = Compiler(RunSettings(), model, slot=make_slot())
    off.turn(on=True)
    assert model._compiled_call_impl is None, "nothing where it is not asked for"
    assert not off.is_wanted


def _build(_me, folder, script):
    _compiler(folder)
    builder = importlib.import_module("torch._inductor.cpp_builder")
    (folder / "build.sh").write_text(script, encoding="utf-8")
    target = folder / "made.so"
    with contextlib.suppress(Exception):  # what it raises for a failed command is torch's own
        builder.run_compile_cmd(f"sh {folder}/build.sh -O2 -o {target}", str(folder))
    return target.read_text(encoding="utf-8") if target.exists() else None


@pytest.mark.parametrize(
    ("script", "left"), [('printf whole > "$3"', "whole"), ('printf half > "$3"; exit 1', None)]
)
def test_no_half_of_a_library_is_ever_in_the_cache(tmp_path, script, left):
    """It comes there by a rename, once the linker has ended well."""
    assert run_ranks(_build, 1, tmp_path, script) == [left]


def test_what_is_not_exact_about_compiling_says_so():
    """What follows from chance or from a process's past; the default does from neither."""
    assert why_kernels_vary(RunSettings(compile=True)) == ""
    assert why_kernels_vary(RunSettings(compile=True, compile_mode="reduce-overhead")) == ""
    assert "timing" in why_kernels_vary(RunSettings(compile=True, compile_mode="max-autotune"))
    assert "met first" in why_kernels_vary(RunSettings(compile=True, compile_dynamic=True))


def _steps_of_blocks(_me, is_compiled):
    seed_all(5)
    model = Layered()
    checkpoint_activations(model, "all" if is_compiled else "off")
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    if is_compiled:
        compiled_parts.options = {"backend": backend}
        model.compile(backend=backend)
    for step in range(3):
        seed_step(seed=5, step=step, rank=0, micro_step=0)
        model(torch.randn(6, 8)).square().mean().backward()
    numbers = [parameter.grad for parameter in model.parameters()] + list(model.buffers())
    return len(graphs), [number.tolist() for number in numbers]


def test_parts_that_recompute_are_compiled_by_themselves():
    """With the same operations the same bits, dropout too; batch statistics and counters move once."""
    ((_, plain),) = run_ranks(_steps_of_blocks, 1, False)
    ((graphs, compiled),) = run_ranks(_steps_of_blocks, 1, True)
    assert graphs > 0
    assert compiled == plain


@pytest.mark.parametrize(
    ("other", "value"), [("ddp.sync_batchnorm", True), ("memory.activation_checkpointing", "all")]
)
def test_one_graph_with_what_is_none_is_refused(other, value):
    """In one line that names both."""
    values = {"compile": True, "compile_fullgraph": True, other: value}
    with pytest.raises(BadInputError, match=f"compile_fullgraph=true: cannot be with .*{other}"):
        check_relations(from_flat(values))
    check_relations(from_flat({**values, "compile_fullgraph": False}))
