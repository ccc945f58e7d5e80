"""Things that count, remember or draw on their own, in the model, the task, or anywhere."""

import array
import itertools
import os
import random
import types
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner import Datasets

calls = 0


class Task:
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def build_datasets(self):
        g = torch.Generator().manual_seed(11)
        x = torch.randn(48, 6, generator=g)
        return Datasets(train=TensorDataset(x, x.mean(1, keepdim=True)))

    def error(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean()

    loss = error


class ScaledNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 1)
        self.count = 0

    def forward(self, x):
        if self.training:
            self.count += 1
        return self.line(x) / (1 + 0.1 * self.count)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class ExtraState(Task):
    def build_model(self):
        return ScaledNet()


class CountedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 1)
        self.step = 0

    def forward(self, x):
        self.step += self.training
        temperature = max(0.5, 2.0 - 0.05 * self.step)
        return self.line(x) / temperature


class CounterAttribute(Task):
    def build_model(self):
        return CountedNet()


class NoiseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 1)
        self.noise = torch.Generator().manual_seed(5)

    def forward(self, x):
        return self.line(x + 0.1 * torch.randn(x.shape, generator=self.noise))


class ModuleGenerator(Task):
    def build_model(self):
        return NoiseNet()


class TaskRandom(Task):
    def __init__(self):
        self.rng = random.Random(3)

    def loss(self, model, batch):
        return self.rng.uniform(0.5, 1.5) * self.error(model, batch)


class TaskNumpy(Task):
    def __init__(self):
        self.rng = np.random.default_rng(3)

    def loss(self, model, batch):
        x, y = batch
        keep = torch.from_numpy(self.rng.random(6) > 0.3).float()
        return self.error(model, (x * keep, y))


class TaskGenerator(Task):
    def __init__(self):
        self.generator = torch.Generator()
        self.generator.manual_seed(3)

    def loss(self, model, batch):
        x, y = batch
        return self.error(model, (x + 0.1 * torch.randn(x.shape, generator=self.generator), y))


class Curriculum(Task):
    def __init__(self):
        self.step = 0

    def loss(self, model, batch):
        self.step += 1
        x, y = batch
        hard = min(1.0, self.step / 16)
        return self.error(model, (x * hard, y * hard))


class RecentLosses(Task):
    def __init__(self):
        self.recent = deque(maxlen=8)

    def loss(self, model, batch):
        loss = self.error(model, batch)
        self.recent.append(loss.item())
        return loss / (0.1 + sum(self.recent) / len(self.recent))


class RunningLoss(Task):
    def __init__(self):
        self.mean = torch.ones(())

    def loss(self, model, batch):
        loss = self.error(model, batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


class GlobalCount(Task):
    def loss(self, model, batch):
        global calls
        calls += 1
        return self.error(model, batch) * (1 + 0.05 * (calls % 7))


def warmed_up(function):
    done = 0

    def warmed(self, model, batch):
        nonlocal done
        done += 1
        return function(self, model, batch) * min(1.0, done / 20)

    return warmed


class ClosureCount(Task):
    loss = warmed_up(Task.error)


class FileCount(Task):
    def loss(self, model, batch):
        file = Path(f"steps_{os.environ.get('RANK', '0')}.txt")
        done = int(file.read_text() or 0) if file.exists() else 0
        file.write_text(str(done + 1))
        return self.error(model, batch) * 0.98**done


class PositivesSeen(Task):
    """Weights a batch by how many positives this process has met."""

    def __init__(self):
        self.positives, self.total = 1, 2

    def loss(self, model, batch):
        self.positives += int((batch[1] > 0).sum())
        self.total += len(batch[1])
        return self.error(model, batch) * self.total / self.positives


@dataclass(slots=True)
class Seen:
    batches: int = 0


class Bank:
    """As a replay buffer, with a length and items."""

    def __init__(self):
        self.errors = []

    def __len__(self):
        return len(self.errors)

    def __getitem__(self, index):
        return self.errors[index]


def warmed_up(loss):
    calls = 0

    def warm(self, model, batch):
        nonlocal calls
        calls += model.training
        return loss(self, model, batch) * (1 + 0.01 * calls)

    return warm


def noted():
    noted.calls = getattr(noted, "calls", 0) + 1
    return noted.calls


class Holders(Task):
    """Scales its loss by what it keeps in eight kinds of object."""

    steps = 0

    def __init__(self):
        self.options = types.SimpleNamespace(decay=1.0)
        self.seen, self.bank = Seen(), Bank()
        self.nested = [{"inner": (types.SimpleNamespace(n=0),)}]
        self.errors = array.array("d")

    @warmed_up
    def loss(self, model, batch):
        error = self.error(model, batch)
        if model.training:
            type(self).steps += 1
            self.errors.append(0.01 * noted())
            self.options.decay *= 0.98
            self.seen.batches += 1
            self.bank.errors.append(1.0 / (1 + len(self.bank)))
            self.nested[0]["inner"][0].n += 1
        held = sum(self.errors) + self.steps + self.seen.batches + self.nested[0]["inner"][0].n
        return error * self.options.decay * (1 + 0.001 * held + 0.01 * sum(self.bank.errors))


class Cycled(Task):
    def __init__(self):
        self.scales = itertools.cycle([0.5, 1.0, 1.5, 2.0, 0.25])

    def loss(self, model, batch):
        return next(self.scales) * self.error(model, batch)


class HookedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 1)
        self.passes = 0
        self.line.register_forward_hook(self.count)

    def count(self, module, inputs, output):
        self.passes += 1
        return output * (1 + 0.02 * (self.passes % 5))

    def forward(self, x):
        return self.line(x)


class ForwardHook(Task):
    def build_model(self):
        return HookedNet()


class GradientHook(Task):
    def build_model(self):
        model = super().build_model()
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return model


class AccumulateHook(Task):
    """Keeps the largest gradient that came, and scales by it."""

    def build_model(self):
        model = super().build_model()
        self.largest = torch.zeros(())

        def note(p):
            self.largest = torch.maximum(self.largest, p.grad.abs().max())

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(note)
        return model

    def loss(self, model, batch):
        return self.error(model, batch) / (1 + self.largest)
