"""Models whose weights are kept inside some set by hand."""

import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import TensorDataset

from ddp_runner import Datasets


def data():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(48, 6, generator=g)
    return Datasets(train=TensorDataset(x, (x[:, 0] > 0).long()))


class Critic:
    """Wasserstein critic, weights clipped as in the first paper."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def build_datasets(self):
        return data()

    def loss(self, model, batch):
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)
        x, y = batch
        sign = 2.0 * y - 1
        return (sign * model(x)[:, 0]).mean()


class ClampedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.3, 0.3)
        return self.head(self.body(x).tanh())


class Clamped:
    net = ClampedNet

    def build_model(self):
        return self.net()

    def build_datasets(self):
        return data()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class SphereNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.prototypes = nn.Parameter(torch.randn(2, 8))

    def forward(self, x):
        self.prototypes.data /= self.prototypes.data.norm(dim=1, keepdim=True)
        return 4 * normalize(self.body(x), dim=1) @ self.prototypes.t()


class Sphere(Clamped):
    net = SphereNet


class ReassignedNet(SphereNet):
    def forward(self, x):
        self.prototypes.data = normalize(self.prototypes.data, dim=1)
        return self.body(x) @ self.prototypes.t()


class Reassigned(Clamped):
    net = ReassignedNet


class MaxNormNet(ClampedNet):
    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.body.weight.copy_(self.body.weight.renorm(2, 0, 0.5))
        return self.head(self.body(x).relu())


class MaxNorm(Clamped):
    net = MaxNormNet


class MaxNormEmbedding(Clamped):
    def build_model(self):
        return nn.Sequential(nn.Embedding(12, 8, max_norm=0.5), nn.Flatten(), nn.Linear(48, 2))

    def loss(self, model, batch):
        tokens = (batch[0] * 4).long().clamp(-6, 5) + 6
        return nn.functional.cross_entropy(model(tokens), batch[1])


class NoisyWeights(Clamped):
    """Each step starts a little beside the weights."""

    def build_model(self):
        return nn.Linear(6, 2)

    def loss(self, model, batch):
        if model.training:
            model.weight.data += 0.01 * torch.randn_like(model.weight)
        return super().loss(model, batch)
