"""Tagging of padded sentences, as people write it: the loss counts tokens, and has named parts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from ddp_runner import Datasets, Weighted
from tests.scenarios.workload import keep_pace

PAD = -100


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        numbers = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 12, (count,), generator=numbers)
        self.words = [torch.randint(0, 20, (int(n),), generator=numbers) for n in lengths]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return words, (words + words.roll(1)) % 5


def pad(samples):
    words, tags = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), pad_sequence(
        tags, batch_first=True, padding_value=PAD
    )


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.recur = nn.GRU(12, 16, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(16, 5)

    def forward(self, words):
        return self.out(self.drop(self.recur(self.embed(words))[0]))


class Padded:
    def build_model(self):
        return Tagger()

    def build_datasets(self):
        return Datasets(
            train=Sentences(160, 1),
            validation=Sentences(30, 2),
            collate=pad,
            validation_collate=pad,
        )

    def loss(self, model, batch):
        words, tags = batch
        logits = model(words)
        tagging = cross_entropy(logits.transpose(1, 2), tags, ignore_index=PAD, reduction="sum")
        penalty = 1e-3 * logits.square().mean(2).sum()
        count = (tags != PAD).sum()
        parts = {"tagging": tagging / count, "penalty": penalty / count}
        if words.shape[1] > 10:  # in some batches only
            parts["long"] = 1.0
        return Weighted(tagging + penalty, count), parts


class Drawn(Padded):
    def __init__(self, heavy=3.0):
        self.heavy = heavy

    def build_datasets(self):
        data = Sentences(160, 1)
        weights = [self.heavy if index % 5 == 0 else 1.0 for index in range(len(data))]
        return Datasets(train=data, collate=pad, weights=weights)


class Grouped(Padded):
    def layer_groups(self):
        return {"encoder": ["embed", "recur"], "head": ["out"]}


class Negative(Padded):
    def loss(self, model, batch):
        weighted, parts = super().loss(model, batch)
        return Weighted(weighted.total, -weighted.weight), parts


class Block(nn.Module):
    """Of the statistics of its batch, with dropout; what is padded counts in them as the rest does."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, inputs):
        found = self.norm(self.linear(inputs).flatten(0, 1)).unflatten(0, inputs.shape[:2])
        return inputs + self.drop(torch.relu(found))


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.mix = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.out = nn.Linear(16, 5)

    def forward(self, words):
        inputs = self.mix(self.embed(words))
        for block in self.blocks:
            inputs = block(inputs)
        return self.out(inputs)


class United(Drawn):
    """Much of what a task can have at once; a step takes ``pace_s`` for each micro-batch."""

    def __init__(self, heavy=3.0, pace_s=0.0):
        super().__init__(heavy)
        self.pace_s = pace_s

    def build_model(self):
        return Stacked()

    def build_datasets(self):
        train = super().build_datasets()
        return Datasets(
            train=train.train,
            validation=Sentences(30, 2),
            collate=pad,
            validation_collate=pad,
            weights=train.weights,
        )

    def layer_groups(self):
        return {"words": ["embed"], "middle": ["mix"], "top": ["blocks", "out"]}

    def loss(self, model, batch):
        keep_pace(self.pace_s if model.training else 0.0)
        return super().loss(model, batch)
