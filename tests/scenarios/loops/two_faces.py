"""One training, as a Task for ``train`` and, run as a file, as a loop that attaches."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ddp_runner

STEPS, BATCH_SIZE, RATE = 24, 4, 1e-2


def make_model():
    return nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4)
    )


def make_data():
    x = torch.randn(240, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


class Faces:
    """The Task: model, data and loss, and nothing of a loop."""

    def build_model(self):
        return make_model()

    def build_datasets(self):
        return ddp_runner.Datasets(train=make_data())

    def loss(self, model, batch):
        inputs, labels = batch
        return cross_entropy(model(inputs), labels)


def main():
    """The loop."""
    run = ddp_runner.attach()
    model = make_model().to(run.device)
    matrices = [one for one in model.parameters() if one.ndim >= 2]
    vectors = [one for one in model.parameters() if one.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=RATE, fused=True
    )
    net = run.ddp(model, find_unused_parameters=True)
    run.keep(model=model, optimizer=optimizer)
    loader = run.loader(make_data(), batch_size=BATCH_SIZE)
    for inputs, labels in run.steps(loader, max_steps=STEPS):
        with run.step():
            loss = cross_entropy(net(inputs), labels)
            run.note(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
