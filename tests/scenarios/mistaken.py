"""Tasks with a newcomer's mistakes in what they return."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner import Datasets


class TupleLoss:
    """Returns what its model's forward gave."""

    def build_model(self):
        return nn.Linear(4, 1)

    def build_datasets(self):
        data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return Datasets(train=TensorDataset(data), validation=TensorDataset(data[:8]))

    def loss(self, model, batch):
        outputs = model(batch[0])
        return outputs.square().mean(), outputs


class DetachedLoss(TupleLoss):
    """Returns a number that nothing can be learnt from."""

    def loss(self, model, batch):
        return super().loss(model, batch)[0].detach()


class DictOfEvaluation(TupleLoss):
    """Returns more where it is not trained."""

    def loss(self, model, batch):
        loss, logits = super().loss(model, batch)
        return loss if model.training else {"loss": loss, "logits": logits}


class NotedData(TupleLoss):
    """Has a word to say of its data, as one text instead of a list of them."""

    def build_datasets(self):
        return replace(super().build_datasets(), notes="64 rows of nothing in particular")

    def loss(self, model, batch):
        return super().loss(model, batch)[0]


class Secretive(NotedData):
    """Is given a key, and says it aloud when something fails."""

    def __init__(self, api_key: str):
        self._api_key = api_key

    def build_datasets(self):
        return replace(super().build_datasets(), notes=[f"read with {self._api_key}"])

    def loss(self, model, batch):
        given = (self._api_key, os.environ.get("SERVICE_TOKEN", "nothing"))
        logging.getLogger("service").warning("logging in with %s and %s", *given)
        if Path("outage").exists():
            raise RuntimeError(f"the service refuses {self._api_key}")
        return super().loss(model, batch)


class Aborting(NotedData):
    """Its second rank dies of what C++ would say: a token that it was refused."""

    def loss(self, model, batch):
        if os.environ["RANK"] == "1" and not Path("aborted").exists():
            Path("aborted").touch()
            said = f"terminate called after throwing\n  what():  no {os.environ['DB_PASSWORD']}\n"
            os.write(2, said.encode())
            os.abort()
        return super().loss(model, batch)
