"""A loop of one's own that is repaired in place: ``./launch_training.sh run docs/examples/my_loop.py``."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddp_runner

run = ddp_runner.attach()
model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer, scheduler=scheduler)

x = torch.randn(4096, 2, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.prod(1, keepdim=True))


@run.every(steps=50)
def evaluate():
    model.eval()
    with torch.no_grad():
        error = nn.functional.mse_loss(net(x.to(run.device)), data.tensors[1].to(run.device))
    model.train()
    if run.is_first:
        print(f"step {run.step_number}: error {error:.4f}")


for inputs, targets in run.steps(run.loader(data, batch_size=32), max_steps=200):
    with run.step():
        loss = nn.functional.mse_loss(net(inputs.to(run.device)), targets.to(run.device))
        run.note(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

if run.is_first:
    torch.save(model.state_dict(), "product.pt")
