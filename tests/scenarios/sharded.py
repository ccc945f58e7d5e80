"""A task over JSONL files, a shard each, shuffled in blocks and with noise of each item's own seed."""

from __future__ import annotations

import json
import random
from itertools import islice

import torch

from ddp_runner import Datasets, JsonLines
from tests.scenarios.workload import PacedTask

FILES = 11


def write(folder, *, bad=False):
    """Files of 12 to 22 items; ``bad``: one line in each fourth file is not JSON. As ``--task`` arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(FILES):
        lines = [json.dumps({"shard": shard, "n": n}) for n in range(12 + shard)]
        if bad and shard % 4 == 0:
            lines[5] = "{no JSON"
        (folder / f"{shard:02}.jsonl").write_text("\n".join(lines))
    return (f"task.folder={folder}",)


class ShardTask(PacedTask):
    """``PacedTask`` with such a stream to train on."""

    def __init__(self, *, folder, pace_s=0.02):
        super().__init__(pace_s=pace_s)
        self._folder = folder

    def build_datasets(self):
        return Datasets(train=Blocks(JsonLines(f"{self._folder}/*.jsonl"), size=5))


class Blocks:
    """As docs/streams.md has it: shuffled within blocks, and with a function over the items."""

    def __init__(self, lines, *, size):
        self._lines, self._size = lines, size
        self.shards, self.names = lines.shards, lines.names

    @property
    def lengths(self):
        return self._lines.lengths

    def read(self, shard, position):
        begin, out, seed = position or (None, 0, random.getrandbits(48))
        lines = self._lines.read(shard, begin)
        while block := list(islice(lines, self._size)):
            order = random.Random(f"{seed} {begin}").sample(range(len(block)), len(block))
            for count, place in enumerate(order[out:], start=out + 1):
                item = block[place][0]
                made = item if isinstance(item, Exception) else made_of(item)
                yield made, (begin, count, seed)
            begin, out = block[-1][1], 0


def made_of(item):
    """What a step gets of it."""
    number = item["shard"] * 100 + item["n"]
    clean = torch.randn(8, generator=torch.Generator().manual_seed(number))
    noise = 0.05 * torch.randn(8) + 0.01 * random.random()
    return clean + noise, clean[:2].sum().unsqueeze(0), number
