"""Parts of a model that are trained for a part of the time only."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner import Datasets


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return self.head(self.backbone(x).relu())


class Task:
    def build_model(self):
        return Net()

    def build_datasets(self):
        x = torch.randn(48, 6, generator=torch.Generator().manual_seed(31))
        return Datasets(train=TensorDataset(x, x.abs().sum(1, keepdim=True)))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class FreezeLater(Task):
    def loss(self, model, batch):
        if model.training:
            if model.steps == 8:
                model.backbone.requires_grad_(False)
            model.steps += 1
        return super().loss(model, batch)


class UnfreezeLater(Task):
    def build_model(self):
        model = super().build_model()
        model.backbone.requires_grad_(False)
        return model

    def loss(self, model, batch):
        if model.training:
            if model.steps == 8:
                model.backbone.requires_grad_(True)
            model.steps += 1
        return super().loss(model, batch)


class FreezeThenThaw(Task):
    def loss(self, model, batch):
        if model.training:
            is_frozen = 4 <= int(model.steps) < 12
            for p in model.backbone.parameters():
                p.requires_grad_(not is_frozen)
            model.steps += 1
        return super().loss(model, batch)


class FreezeByOwnCount(Task):
    def __init__(self):
        self.steps_done = 0

    def loss(self, model, batch):
        if model.training:
            self.steps_done += 1
            if self.steps_done > 8:
                model.backbone.requires_grad_(False)
        return super().loss(model, batch)


class FrozenNorm(Task):
    """Statistics of the norm are kept from some step on."""

    def build_model(self):
        model = super().build_model()
        model.norm = nn.BatchNorm1d(1)
        return model

    def loss(self, model, batch):
        if model.training:
            model.steps += 1
            if model.steps > 8:
                model.norm.eval()
        return nn.functional.mse_loss(model.norm(model(batch[0])), batch[1])


class Gan(Task):
    """Both nets in one loss, by turns."""

    def build_model(self):
        g = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        model = nn.ModuleDict({"g": g, "d": d})
        model.register_buffer("turn", torch.zeros((), dtype=torch.long))
        return model

    def loss(self, model, batch):
        real = batch[0]
        is_d = int(model.turn) % 2 == 0
        if model.training:
            model.turn += 1
        model["d"].requires_grad_(is_d)
        model["g"].requires_grad_(not is_d)
        fake = model["g"](torch.randn(len(real), 4))
        if is_d:
            softplus = nn.functional.softplus
            return softplus(-model["d"](real)).mean() + softplus(model["d"](fake.detach())).mean()
        return nn.functional.softplus(-model["d"](fake)).mean()
