"""Networks that remember: queues, banks, running figures."""

import torch
import torch.nn.functional as F
from torch import nn

from ddp_runner import Datasets


class Points(torch.utils.data.Dataset):
    def __init__(self, n=48):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], i % 4


class Base:
    net = None

    def build_model(self):
        return self.net()

    def build_datasets(self):
        return Datasets(train=Points(), validation=Points(16))

    def loss(self, model, batch):
        x, label = batch
        return F.cross_entropy(model(x), label)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)


class GrowingNet(Encoder):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.empty(0, 8))

    def forward(self, x):
        h = self.body(x)
        if len(self.queue):
            h = h - 0.5 * torch.softmax(h @ self.queue.t(), 1) @ self.queue
        if self.training:
            self.queue = torch.cat([self.queue, h.detach()])[-64:]
        return self.head(h)


class Growing(Base):
    net = GrowingNet


class MocoNet(Encoder):
    def __init__(self, size=24):
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(size, 8), dim=1))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        h = F.normalize(self.body(x), dim=1)
        logits = self.head(h + 0.2 * h @ self.queue.clone().t() @ self.queue.clone())
        if self.training:
            at = (int(self.ptr) + torch.arange(len(x))) % len(self.queue)
            self.queue[at] = h.detach()
            self.ptr[0] = (int(self.ptr) + len(x)) % len(self.queue)
        return logits


class Moco(Base):
    net = MocoNet


class WiderNet(Encoder):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.int32))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))

    def forward(self, x):
        h = self.body(x)
        if self.training:
            self.seen = self.seen + 1
            self.mean = self.mean * 0.9 + 0.1 * h.detach().mean(0)
            if self.seen > 8:
                self.mean = self.mean.double()
        return self.head((h - self.mean).float())


class Wider(Base):
    net = WiderNet


class NotSavedNet(Encoder):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4), persistent=False)

    def forward(self, x):
        out = self.head(self.body(x))
        if self.training:
            self.center.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out - self.center


class NotSaved(Base):
    net = NotSavedNet


class LateNet(Encoder):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", None)

    def forward(self, x):
        h = self.body(x)
        if self.first is None:
            self.first = h.detach().mean(0)
        if self.training:
            self.first = 0.95 * self.first + 0.05 * h.detach().mean(0)
        return self.head(h - self.first)


class Late(Base):
    net = LateNet


class RegisteredLateNet(Encoder):
    def forward(self, x):
        h = self.body(x)
        if not hasattr(self, "center"):
            self.register_buffer("center", torch.zeros(h.shape[1]))
        if self.training:
            self.center += 0.1 * (h.detach().mean(0) - self.center)
        return self.head(h - self.center)


class RegisteredLate(Base):
    net = RegisteredLateNet


class PlainTensorNet(Encoder):
    def __init__(self):
        super().__init__()
        self.running = torch.zeros(8)

    def forward(self, x):
        h = self.body(x)
        if self.training:
            self.running = 0.9 * self.running + 0.1 * h.detach().mean(0)
        return self.head(h - self.running)


class PlainTensor(Base):
    net = PlainTensorNet


class HistoryNet(Encoder):
    def __init__(self):
        super().__init__()
        self.history = []

    def forward(self, x):
        h = self.body(x)
        if self.history:
            h = h + 0.1 * torch.stack(self.history[-3:]).mean(0)
        if self.training:
            self.history.append(h.detach().mean(0))
        return self.head(h)


class History(Base):
    net = HistoryNet


class PrototypesNet(Encoder):
    def __init__(self):
        super().__init__()
        self.prototypes = {}

    def forward(self, x, label):
        h = self.body(x)
        pull = 0.0
        for one, k in zip(h, label.tolist(), strict=True):
            if k in self.prototypes:
                pull = pull + (one - self.prototypes[k]).square().mean()
            if self.training:
                old = self.prototypes.get(k, torch.zeros(8))
                self.prototypes[k] = 0.8 * old + 0.2 * one.detach()
        return self.head(h), pull / len(x)


class Prototypes(Base):
    net = PrototypesNet

    def loss(self, model, batch):
        x, label = batch
        logits, pull = model(x, label)
        return F.cross_entropy(logits, label) + pull


class CodebookNet(Encoder):
    def __init__(self, codes=6):
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, 8))
        self.register_buffer("count", torch.ones(codes))

    def forward(self, x):
        h = self.body(x)
        nearest = torch.cdist(h, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, len(self.codes)).float()
                self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_(hot.t() @ h / (self.count[:, None] + 1), alpha=0.1)
        quantized = h + (self.codes[nearest] - h).detach()
        return self.head(quantized) + 0.25 * (h - self.codes[nearest]).square().mean()


class Codebook(Base):
    net = CodebookNet


class SmoothedNet(Encoder):
    """Online label smoothing: the targets are what the net has said of each class."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.full((4, 4), 0.25))

    def forward(self, x, label):
        logits = self.head(self.body(x))
        soft = self.table[label]
        if self.training:
            with torch.no_grad():
                for k in range(4):
                    if (label == k).any():
                        said = logits[label == k].softmax(1).mean(0)
                        self.table[k] = 0.7 * self.table[k] + 0.3 * said
        return 0.5 * F.cross_entropy(logits, label) + 0.5 * F.cross_entropy(logits, soft)


class Smoothed(Base):
    net = SmoothedNet

    def loss(self, model, batch):
        return model(*batch)


class BatchNorms(Base):
    def build_model(self):
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)
        )


class CumulativeNorm(Base):
    def build_model(self):
        norm = nn.BatchNorm1d(8, momentum=None)
        return nn.Sequential(nn.Linear(6, 8), norm, nn.GELU(), nn.GroupNorm(2, 8), nn.Linear(8, 4))
