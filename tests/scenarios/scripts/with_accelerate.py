"""A training loop with accelerate, as its documentation has it: prepare, accumulate, save_state, load_state."""

import glob
import time

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    project = ProjectConfiguration(project_dir="out", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project)
    set_seed(3)
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    begin = 0
    saved = sorted(glob.glob("out/checkpoints/checkpoint_*"))
    if saved:
        accelerator.load_state(saved[-1])
        begin = int(saved[-1].rpartition("_")[2]) + 1
        accelerator.project_configuration.iteration = begin
        accelerator.print(f"resumed at epoch {begin}")
    for epoch in range(begin, 6):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            time.sleep(0.02)
        accelerator.wait_for_everyone()
        accelerator.save_state()
        accelerator.print(f"epoch {epoch} loss {accelerator.gather(loss).mean():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
