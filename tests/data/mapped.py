"""Loaders of map-style data for tests: options of the loader and of its source in one call."""

from __future__ import annotations

from dataclasses import fields

from ddp_runner.data.loader import Loader, LoadObserver, LoadOptions
from ddp_runner.data.map_source import MapSource
from ddp_runner.data.source import Cut
from ddp_runner.data.workers.fetch import SampleReader
from ddp_runner.data.workers.memory_files import collate_batch

OF_CUT = ("order", "rank", "world_size", "micro_batch_size")
OF_SOURCE = ("seed", "collate_fn", "quarantine", "worker_init", "phase", "suspect")


def map_source(dataset, cut, *, seed, collate_fn=None, worker_init=None, **more):
    """A source of ``dataset``."""
    reader = SampleReader(
        dataset, seed=seed, collate=collate_fn or collate_batch, worker_init=worker_init
    )
    return MapSource(reader, cut, **more)


def loader_of(source, **given):
    """A loader of any source, with options and whoever hears of it in one call."""
    of = {}
    for kind in (LoadOptions, LoadObserver):
        names = [one.name for one in fields(kind) if one.name in given]
        of[kind] = kind(**{name: given.pop(name) for name in names})
    return Loader(source, options=of[LoadOptions], observer=of[LoadObserver], **given)


def map_loader(dataset, *, start_step=None, **given):
    """A loader of ``dataset``, before ``start_step``."""
    cut = Cut(**{name: given.pop(name) for name in OF_CUT})
    of_source = {name: given.pop(name) for name in OF_SOURCE if name in given}
    loader = loader_of(map_source(dataset, cut, **of_source), **given)
    if start_step is not None:
        loader.seek(start_step)
    return loader
