"""The weights of a run that is complete, as plain files beside its checkpoints. Saves no state."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.checkpoint.catalog import FINAL, FINAL_AVERAGE
from ddp_runner.checkpoint.entry_names import bare_state, load_bare_state, read_as
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.transfer import receive_state, send_state
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.system.launch_folder import as_given
from ddp_runner.training.exactness.first_step import report_inexact
from ddp_runner.training.rank_context import RankParts
from ddp_runner.training.saves.disk_faults import DiskFaults
from ddp_runner.training.starting.whole_state import completed_in_run
from ddp_runner.training.state import TrainState


def publish_final(parts: RankParts, best: BestWeights | None = None) -> None:
    """Write the model's state dict, and that with the average where one is kept; for rank 0.

    ``best``: those of the best checkpoint instead. Every reader finds the file of before or the whole new one.
    What the disk refuses is a warning: a checkpoint has the same.
    """
    state, store = parts.state, parts.store
    has_average = state.ema is not None and state.ema.started
    if best is not None:
        has_average = best.average is not None
    names = (FINAL, FINAL_AVERAGE) if has_average else (FINAL,)
    is_there = all((store.directory / name).is_file() for name in names)
    if is_there and state.begun_step == state.committed_step and best is None:
        return  # this launch has trained nothing
    parts.runtime.slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())
    of = "" if best is None else f", of the best checkpoint, step {best.step:,}"
    try:
        for name in names:
            with contextlib.ExitStack() as average:
                if best is not None:
                    weights = best.weights if name == FINAL else best.average
                else:
                    if name == FINAL_AVERAGE and state.ema is not None:
                        average.enter_context(state.ema.swapped_in(state.model))
                    weights = state.weights()
                path = store.publish_weights(name, _on_host(weights or {}))
            parts.runtime.logger.info(
                f"final weights{of}: {as_given(path, parts.settings.run.checkpoint_dir)}",
                step=state.committed_step,
            )
        if not has_average:
            store.withdraw_weights(FINAL_AVERAGE)
    except FaultError as error:
        if parts.runtime.slot.get(Cell.FENCED):
            raise  # this process is about to be killed: its successor writes them
        faults = DiskFaults(state, parts.runtime)
        refused = faults.storage_failed(error.fault.cause)
        faults.warn(refused, "the newest checkpoint has the same weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestWeights:
    """The weights of the best checkpoint, on the host; ``average``: with the average, where one was kept."""

    step: int
    weights: Mapping[str, Any]
    average: Mapping[str, Any] | None

    @property
    def to_use(self) -> Mapping[str, Any]:
        """The weights to use a model with."""
        return self.weights if self.average is None else self.average


def best_weights(parts: RankParts) -> BestWeights | None:
    """Return the weights for ``run.load_best_at_end``; None without it, or without a judged intact checkpoint.

    Reads the file: the state that is trained stays as it is. For rank 0.
    """
    settings, store, state = parts.settings, parts.store, parts.state
    if not settings.run.load_best_at_end:
        return None
    inexact = partial(report_inexact, parts)
    entry = store.catalog.best()
    if entry is None:
        say = inexact if state.best.step else parts.runtime.logger.warning
        say("load_best_at_end: no checkpoint has been judged, the weights are the last ones")
        return None
    parts.runtime.slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())
    try:
        loaded = store.load(str(entry.path))
        assert loaded is not None, "a path is a checkpoint, or an error"
        content = completed_in_run(settings, parts.workload, state, store, loaded)
    except (BadInputError, FaultError, OSError) as error:
        inexact(
            f"load_best_at_end: {entry.path} cannot be used ({error}), the weights are the last ones"
        )
        return None
    known = state.best
    if known.of == parts.workload.monitor.words and known.step != entry.step:
        inexact(
            f"load_best_at_end: {parts.workload.monitor.name} was best after step {known.step:,}, of which there"
            f" is no checkpoint; the weights are of step {entry.step:,}, the best of those there are"
        )
    weights = dict(read_as(content["model"], state.weights()))
    kept = content.get("ema") or {}
    means = read_as({**kept.get("parameters", {}), **kept.get("buffers", {})}, weights)
    average = _averaged(weights, means) if kept.get("parameters") else None
    return BestWeights(step=entry.step, weights=weights, average=average)


def _averaged(weights: Mapping[str, Any], means: Mapping[str, Any]) -> dict[str, Any]:
    """The weights with those that are averaged in their place; of tied ones only one has a mean."""
    of_place = {weights[name].data_ptr(): mean for name, mean in means.items() if mean.numel()}
    return {
        name: of_place.get(one.data_ptr(), means.get(name, one)) if isinstance(one, Tensor) else one
        for name, one in weights.items()
    }


@contextlib.contextmanager
def swapped_in(state: TrainState, best: BestWeights | None) -> Iterator[None]:
    """Within the block the model has the best weights; then its own again."""
    if best is None:
        yield
        return
    model = state.model
    own = {
        name: value.clone()
        for name, value in bare_state(model).items()
        if isinstance(value, Tensor)
    }
    load_bare_state(model, {**bare_state(model), **best.to_use})
    try:
        yield
    finally:
        load_bare_state(model, {**bare_state(model), **own})
        state.buffers.expect_written()  # a rank that is lost from here on costs no exactness


def give_best(parts: RankParts, group: Group, best: BestWeights | None) -> nn.Module | None:
    """The model with the best weights, which rank 0 has, for good; None where they are the last ones.

    Every rank of a run without a supervisor must call it: nothing is trained any more.
    """
    has = group.exchange("best_weights", "1" if best else "")[0]
    if not has:
        return None
    to_use = None if best is None else {"model": dict(best.to_use)}
    if group.world_size > 1:
        others = tuple(range(1, group.world_size))
        if to_use is not None:
            send_state(group, to_use, to=others)
        else:
            to_use = receive_state(group, source=0)
    model = parts.state.model
    load_bare_state(model, {**bare_state(model), **(to_use or {})["model"]})
    return model.eval()


def _on_host(weights: Mapping[str, Any]) -> dict[str, Any]:
    """``weights`` as any machine can read them; tied ones stay tied."""
    copies: dict[tuple[object, ...], Tensor] = {}
    found: OrderedDict[str, Any] = OrderedDict()
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            found[name] = value.cpu() if isinstance(value, Tensor) else value
            continue
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if not value.numel() or place not in copies:
            copies[place] = value.detach().cpu()
        found[name] = copies[place]
    if (versions := getattr(weights, "_metadata", None)) is not None:
        found._metadata = versions  # type: ignore[attr-defined] # noqa: SLF001 - as torch hangs it on
    return found
