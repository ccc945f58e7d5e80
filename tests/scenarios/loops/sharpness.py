"""A loop with SAM: two backwards a step, and two optimizers that have the same parameters and groups."""

import os
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ddp_runner


class Sam(torch.optim.Optimizer):
    """Climbs by the first gradients, and has its base step by the second ones from where it was."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    @torch.no_grad()
    def climb(self):
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        norm = torch.norm(torch.stack(norms))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()


class Count:
    """A kept object that does not take its state back where a file says so, once."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        if state["steps"] and os.path.exists("refuses"):
            os.remove("refuses")
            raise ValueError("steps cannot be loaded")
        self.steps = state["steps"]


def wait(run):
    """Once where a file ``wait_STEP`` says so, for what the test does then."""
    path = f"wait_{run.step_number}"
    if run.is_first and os.path.exists(path):
        os.rename(path, f"waits_{path[5:]}")
        time.sleep(60)


run = ddp_runner.attach()
torch.manual_seed(0)
x = torch.randn(512, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
net = run.ddp(model)
sam = Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(sam, 4, gamma=0.8)
count = Count()
run.keep(model=model, sam=sam, base=sam.base, schedule=schedule, count=count)
for xb, yb in run.steps(run.loader(data, batch_size=8), max_steps=24):
    with run.step():
        wait(run)
        mse_loss(net(xb), yb).backward()
        sam.climb()
        sam.zero_grad()
        mse_loss(net(xb), yb).backward()
        sam.step()
        sam.zero_grad()
        schedule.step()
        count.steps += 1
if run.is_first:
    kept = {"model": model, "sam": sam, "base": sam.base, "schedule": schedule, "count": count}
    torch.save({name: one.state_dict() for name, one in kept.items()}, "final.pt")
