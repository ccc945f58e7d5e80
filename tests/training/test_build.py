"""What is refused before anything is trained, with the option that would mend it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_runner.config import from_flat
from ddp_runner.core.faults import BadInputError
from ddp_runner.data.stream import StreamOrder
from ddp_runner.training.build import build_workload
from ddp_runner.training.runtime import Place

STREAMING = Path(__file__).parents[1] / "scenarios" / "streaming.py"


def build(name="StreamTask", **settings):
    place = Place(rank=0, local_rank=0, world_size=2, local_world_size=2, device="cpu", loads=True)
    flat = {"task": f"{STREAMING}:{name}", "batch_size": 4, "max_steps": 30, "num_workers": 0}
    return build_workload(from_flat({**flat, **settings}), place)


@pytest.fixture(autouse=True)
def _generators_kept():
    with torch.random.fork_rng():
        yield


def test_a_stream_without_a_length_is_as_long_as_the_run():
    """``--max-steps`` says so; the position is part of the state."""
    workload, state = build()
    assert isinstance(workload.order, StreamOrder)
    assert workload.length.total_steps == 30
    assert workload.meaning["data fingerprint"] == "a stream"
    assert state.stream is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 1}, "data.num_workers=1: must be 0 with an iterable dataset"),
        ({"max_steps": 0}, "--max-steps=0: must say how long to train"),
        ({"name": "StreamedValidation"}, "its validation data must be map-style"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(settings, message):
    """One line that says what would be right."""
    with pytest.raises(BadInputError, match=message):
        build(**settings)
