"""One layer or trick each."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from ddp_runner import Datasets
from tests.hashed_names import Name


class Toy(torch.utils.data.Dataset):
    def __init__(self, dtype=torch.float32):
        self.x = torch.randn(48, 6, generator=torch.Generator().manual_seed(8)).to(dtype)

    def __len__(self):
        return 48

    def __getitem__(self, i):
        return self.x[i], self.x[i].sum()


class Base:
    dtype = torch.float32

    def build_datasets(self):
        return Datasets(train=Toy(self.dtype))

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x).squeeze(-1), y)


def mlp(middle, out=1):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), middle, nn.ReLU(), nn.Linear(8, out))


class SpectralOld(Base):
    def build_model(self):
        return mlp(nn.utils.spectral_norm(nn.Linear(8, 8)))


class SpectralNew(Base):
    def build_model(self):
        return mlp(parametrizations.spectral_norm(nn.Linear(8, 8)))


class WeightNormOld(Base):
    def build_model(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return mlp(nn.utils.weight_norm(nn.Linear(8, 8)))


class WeightNormNew(Base):
    def build_model(self):
        return mlp(parametrizations.weight_norm(nn.Linear(8, 8)))


class Orthogonal(Base):
    def build_model(self):
        return mlp(parametrizations.orthogonal(nn.Linear(8, 8)))


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class OwnParametrization(Base):
    def build_model(self):
        layer = nn.Linear(8, 8)
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return mlp(layer)


class CarryNet(nn.Module):
    """Goes on from where the last batch left it, as in truncated backpropagation through time."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)
        self.out = nn.Linear(8, 1)
        self.state = None

    def forward(self, x):
        h, state = self.lstm(x.view(len(x), 3, 2), self.state)
        if self.training:
            self.state = tuple(s.detach() for s in state)
        return self.out(h[:, -1])


class Carried(Base):
    def build_model(self):
        return CarryNet()


class GruNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.gru(x.view(-1, 3, 2))[0][:, -1])


class Gru(Base):
    def build_model(self):
        return GruNet()


class TiedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.mix(self.embed(ids)).tanh())


class Tied(Base):
    def build_model(self):
        return TiedNet()

    def loss(self, model, batch):
        ids = (batch[0] * 5).round().long().clamp(-8, 7) + 8
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class DropPathNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        h = self.stem(x)
        for branch in self.branches:
            if not self.training or torch.rand(()) < 0.5:
                h = h + branch(h).relu()
        return self.head(h)


class DropPath(Base):
    def build_model(self):
        return DropPathNet()


class PhasedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 1), nn.Linear(6, 1)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        out = self.a(x)
        if self.step >= 5 and self.step % 2:
            out = out + self.b(x)
        if self.training:
            self.step += 1
        return out


class Phased(Base):
    def build_model(self):
        return PhasedNet()


class RecomputedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Recomputed(Base):
    def build_model(self):
        return RecomputedNet()


class GradientPenalty(Base):
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 1))

    def loss(self, model, batch):
        x, y = batch
        x = x.requires_grad_()
        out = model(x)
        if not torch.is_grad_enabled():
            return F.mse_loss(out[:, 0], y)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out[:, 0], y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


class LazyLayers(Base):
    def build_model(self):
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))


class FirstUseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.head = None

    def forward(self, x):
        h = self.stem(x)
        if self.head is None:
            self.head = nn.Linear(h.shape[1], 1)
        return self.head(h)


class MadeOnFirstUse(Base):
    def build_model(self):
        return FirstUseNet()


class Brain(Base):
    dtype = torch.bfloat16

    def build_model(self):
        return mlp(nn.Linear(8, 8)).bfloat16()


class Doubles(Base):
    dtype = torch.float64

    def build_model(self):
        return mlp(nn.BatchNorm1d(8)).double()


class MixedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8).bfloat16()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x.bfloat16()).float())


class Mixed(Base):
    def build_model(self):
        return MixedNet()


class ComplexNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))


class Complex(Base):
    def build_model(self):
        return ComplexNet()


class Heads(Base):
    """One head for each name; nobody cares in which order."""

    def build_model(self):
        names = {Name("price"), Name("speed"), Name("size"), Name("colour")}
        return nn.ModuleDict({str(name): nn.Linear(6, 1) for name in names})

    def loss(self, model, batch):
        x, y = batch
        outs = [model[name](x)[:, 0] * len(name) for name in sorted(model)]
        return F.mse_loss(torch.stack(outs).mean(0), y)
