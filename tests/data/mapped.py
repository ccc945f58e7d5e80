"""Loaders of map-style data for tests: options of the loader and of its source in one call."""

from __future__ import annotations

from ddp_runner.data.loader import Loader
from ddp_runner.data.map_source import MapSource
from ddp_runner.data.source import Cut

OF_CUT = ("order", "rank", "world_size", "micro_batch_size")
OF_SOURCE = ("seed", "collate_fn", "quarantine", "worker_init", "phase", "suspect")


def map_loader(dataset, *, start_step=None, **given):
    """A loader of ``dataset``, before ``start_step``."""
    cut = Cut(**{name: given.pop(name) for name in OF_CUT})
    of_source = {name: given.pop(name) for name in OF_SOURCE if name in given}
    loader = Loader(MapSource(dataset, cut, **of_source), **given)
    if start_step is not None:
        loader.seek(start_step)
    return loader
