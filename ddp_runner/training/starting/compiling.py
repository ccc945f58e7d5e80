"""torch.compile for a run: in place, the same code in every process, and given up on all ranks together.

Compiled code follows from the program and the shapes at hand alone, never from what else a process has
met: a replacement compiles what the rank before it had, or reads it from the run's own cache.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_runner.core.settings import RunSettings
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import Cell, Slot
from ddp_runner.training.components.recompute import compiled_parts

CACHE_FOLDER = "compiled"
GRAPHS_MAX = 64  # of one function; with one more shape a process would go on without compiling
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# INVARIANT compiled-alike: every process of a run has the same code for the same shapes.
# The model's own compilation asks for "dynamic"; functions that a task compiles itself follow these settings.
# Broken if: shapes become dynamic by what was met, a graph is cut where DDP's buckets end, or code is
# left uncompiled because a process has met many shapes. Guarded by:
# test_each_shape_has_code_of_its_own_until_there_are_too_many,
# test_a_compiled_model_is_not_cut_where_buckets_end.
_DYNAMO = {
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "automatic_dynamic_local_pgo": False,
    "automatic_dynamic_remote_pgo": False,
    "optimize_ddp": False,
    "recompile_limit": GRAPHS_MAX,
    "accumulated_recompile_limit": 1 << 20,
    "fail_on_recompile_limit_hit": True,
    # Their names before torch 2.7.
    "cache_size_limit": GRAPHS_MAX,
    "accumulated_cache_size_limit": 1 << 20,
    "fail_on_cache_limit_hit": True,
    "suppress_errors": False,
}
# Compiler processes of its own would outlive a rank that is killed, and be forked with it.
_INDUCTOR = {"compile_threads": 1, "fx_graph_cache": True}


def _compiled_call(model: nn.Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what calls the model compiled, with no change to the model.

    Torch compiles no function of its own that is called first, as the call of an ``nn.Sequential`` is: that of another
    class has ``forward`` of the user's within it.
    """
    if not type(model).__module__.startswith("torch."):
        return torch.compile(model._call_impl, **options)  # noqa: SLF001 - as Module.compile() does

    def call(*args: Any, **named: Any) -> Any:
        return model._call_impl(*args, **named)  # type: ignore[no-untyped-call] # noqa: SLF001

    return torch.compile(call, **options)


class Compiler:
    """Compiles one model in one process. Compiles nothing before the model is called."""

    def __init__(self, settings: RunSettings, model: nn.Module, *, slot: Slot) -> None:
        """``slot``: where it stands that this rank compiles."""
        self._model = model
        self._slot = slot
        self._before = Phase.IDLE  # this rank compiled
        self._call: Callable[..., Any] | None = None  # in place of the model's own
        self.inexact_reason = ""
        if not settings.compile:
            return
        _configure(Path(settings.log_dir).absolute() / CACHE_FOLDER)
        self.inexact_reason = why_kernels_vary(settings)
        if settings.deterministic:
            _set("torch._inductor.config", {"deterministic": True})
        self._show_on_board()
        self._options = {
            "mode": None if settings.compile_mode == "default" else settings.compile_mode,
            "fullgraph": settings.compile_fullgraph,
            "dynamic": settings.compile_dynamic,
        }
        self._call = _compiled_call(model, self._options)
        self.turn(on=False)

    @property
    def is_wanted(self) -> bool:
        """True if the settings ask for compilation."""
        return self._call is not None

    def turn(self, *, on: bool) -> None:
        """Have the model be called as it is compiled, or as it was written. Compiles nothing again."""
        if self._call is not None:
            self._model._compiled_call_impl = self._call if on else None  # noqa: SLF001
            compiled_parts.options = self._options if on else None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Call the model uncompiled in the block.

        For evaluations: steps do not compile for their shapes and weights, which may be an average.
        """
        was_on = self._model._compiled_call_impl is not None  # noqa: SLF001
        self.turn(on=False)
        try:
            yield
        finally:
            self.turn(on=was_on)

    def _show_on_board(self) -> None:
        """A rank that compiles is given the time for it, at whichever step."""
        handler = importlib.import_module("torch._dynamo.callback").callback_handler

        def begin(*_: Any) -> None:
            self._before = Phase(self._slot.get(Cell.PHASE))
            self._slot.stamp(Phase.COMPILE, time.monotonic_ns())

        def end(*_: Any) -> None:
            if self._slot.get(Cell.PHASE) == Phase.COMPILE:
                self._slot.stamp(self._before, time.monotonic_ns())

        handler.register_start_callback(begin)
        handler.register_end_callback(end)


def why_kernels_vary(settings: RunSettings) -> str:
    """Why two processes may have other code for the same shapes; "" where they have not."""
    if settings.compile_dynamic:
        return "compile_dynamic=true: code follows from the shapes that a process has met first"
    if settings.compile_mode == "max-autotune":
        return "compile_mode=max-autotune: each process chooses kernels by timing them"
    return ""


def _configure(folder: Path) -> None:
    os.environ[_CACHE_VARIABLE] = str(folder)  # torch itself has set it by now
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    _set("torch._dynamo.config", _DYNAMO)
    _set("torch._inductor.config", _INDUCTOR)
    _publish_whole_libraries()


def _set(module: str, values: dict[str, Any]) -> None:
    """Set the values that the installed torch knows."""
    config = importlib.import_module(module)
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)


def _publish_whole_libraries() -> None:
    """Have a library come into the cache by a rename: who is killed while linking leaves no half of one.

    inductor takes what stands under its name for whole (torch, _inductor/codecache.py: _worker_compile_cpp).
    """
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    run = getattr(builder, "run_compile_cmd", None)
    if run is None or getattr(run, "publishes_whole", False):
        return

    def run_and_rename(cmd_line: str, cwd: str) -> None:
        words = shlex.split(cmd_line)
        target = words[words.index("-o") + 1] if "-o" in words else ""
        if not target or cmd_line.count(target) != 1:
            run(cmd_line, cwd)
            return
        unfinished = f"{target}.{os.getpid()}"
        run(cmd_line.replace(target, unfinished), cwd)
        at = Path(cwd, unfinished)
        if at.exists():
            at.replace(Path(cwd, target))

    run_and_rename.publishes_whole = True  # type: ignore[attr-defined]
    builder.run_compile_cmd = run_and_rename
