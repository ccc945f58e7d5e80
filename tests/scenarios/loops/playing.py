"""A loop that learns from play, and a Task that does: each rank has its own environment, random generator and replay buffer.

With ``--forget`` nothing of that is kept; ``--late``: a running mean is changed behind the update; ``--plays-late``:
the environment is, too.
"""

import dataclasses
import os
import sys
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddp_runner

STEPS = 24
FORGETS, IS_LATE = "--forget" in sys.argv, "--late" in sys.argv
PLAYS_LATE = "--plays-late" in sys.argv


class Cart:
    """A cart that is pushed left or right, and pushed by the wind."""

    def __init__(self, rng):
        self.rng = rng
        self.at = np.zeros(2)
        self.games = 0

    def push(self, action):
        self.at[1] += 0.1 * action + 0.05 * self.rng.standard_normal()
        self.at[0] += self.at[1]
        is_over = abs(self.at[0]) > 1.0
        seen = self.at.astype(np.float32).copy()
        if is_over:
            self.games += 1
            self.at[:] = 0.1 * self.rng.standard_normal(2)
        return seen, float(np.cos(seen[0])) - is_over


@dataclasses.dataclass
class Mean:
    """A running mean, and how many numbers it is of."""

    value: float = 0.0
    count: int = 0

    def add(self, one):
        self.count += 1
        self.value += (one - self.value) / self.count


class Forgetful:
    """The same as a Task whose loss plays; nobody keeps what the ranks have of their own."""

    def __init__(self):
        self.rng = np.random.default_rng(100 + int(os.environ["RANK"]))
        self.cart, self.replay = Cart(self.rng), deque(maxlen=64)

    def build_model(self):
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def build_datasets(self):
        return ddp_runner.Datasets(train=TensorDataset(torch.arange(96)))

    def loss(self, model, batch):
        for _ in range(4):
            with torch.no_grad():
                action = model(torch.from_numpy(self.cart.at.astype(np.float32))).sign()
            self.replay.append(self.cart.push(float(action)))
        picked = self.rng.integers(len(self.replay), size=len(batch[0]))
        seen = torch.from_numpy(np.stack([self.replay[i][0] for i in picked]))
        reward = torch.tensor([[self.replay[i][1]] for i in picked])
        return (model(seen) - reward).square().mean()


class Players(Forgetful):
    """Each rank keeps its own."""

    def local_state(self):
        return {"cart": self.cart, "replay": self.replay, "rng": self.rng}


def harm(rank, step, where):
    path = Path(f"harm_{rank}_{step}_{where}")
    if path.exists():
        text = path.read_text(encoding="utf-8")
        path.unlink()
        exec(text)


def main():
    run = ddp_runner.attach()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    rng = np.random.default_rng(100 + run.rank)
    cart, replay, returns = Cart(rng), deque(maxlen=64), Mean()
    if not FORGETS:
        run.keep_local(cart=cart, replay=replay, rng=rng, returns=returns)

    for _ in run.steps(range(10_000), max_steps=STEPS):
        harm(run.rank, run.step_number, "between")
        with run.step():
            for _ in range(4):
                with torch.no_grad():
                    action = float(model(torch.from_numpy(cart.at.astype(np.float32))).sign())
                replay.append(cart.push(action))
            picked = rng.integers(len(replay), size=8)
            seen = torch.from_numpy(np.stack([replay[i][0] for i in picked]))
            reward = torch.tensor([[replay[i][1]] for i in picked])
            harm(run.rank, run.step_number, "forward")
            loss = (net(seen) - reward).square().mean()
            loss.backward()
            harm(run.rank, run.step_number, "backward")
            if not IS_LATE:
                returns.add(float(reward.mean()))
            optimizer.step()
            harm(run.rank, run.step_number, "update")
            optimizer.zero_grad()
            if PLAYS_LATE:
                replay.append(cart.push(1.0))
            if IS_LATE:
                returns.add(float(reward.mean()))
        if IS_LATE:
            harm(run.rank, run.step_number, "behind")

    own = {
        "at": torch.from_numpy(cart.at),
        "games": cart.games,
        "mean": [returns.value, returns.count],
        "next": float(rng.random()),
        "replay": [float(one[0].sum()) for one in replay],
    }
    torch.save({"own": own, "model": model.state_dict()}, f"final_{run.rank}.pt")


if __name__ == "__main__":
    main()
