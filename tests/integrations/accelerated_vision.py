"""A loop like those of accelerate's own examples, without accumulate(): a net with batch norms, OneCycleLR, accuracy.

Under torchrun, and by plain python, the same file is accelerate's own Accelerator. Harm is at hand.
"""

import os
import sys

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from ddp_runner.integrations.accelerate import Accelerator

WORDS = sys.argv[1:]
EPOCHS = 3


def pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 1, 8, 8, generator=generator)
    return TensorDataset(pixels, (pixels.mean((1, 2, 3)) > 0).long())


def harm(where):
    """Do once what a file ``harm_RANK_STEP_WHERE`` says, if there is one."""
    path = f"harm_{accelerator.process_index}_{int(steps.count)}_{where}"
    if os.path.exists(path):
        with open(path) as file:
            text = file.read()
        os.rename(path, f"done_{path}")
        exec(text)


class Steps(nn.Module):
    """Counts, as a module that is registered for checkpoints."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


class HarmedSgd(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        found = super().step(closure)
        harm("update")
        return found


def main():
    global accelerator, steps
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler="seedable" in WORDS),
        mixed_precision=next((one for one in ("bf16", "fp16") if one in WORDS), "no"),
    )
    if "fp16" in WORDS:
        from tests.integrations.compared import in_fp16

        in_fp16(accelerator)
    steps = Steps()
    set_seed(11)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    )
    optimizer = HarmedSgd(net.parameters(), lr=0.05, momentum=0.9)
    training = DataLoader(pictures(44, 1), batch_size=4, shuffle=True, drop_last=False)
    testing = DataLoader(pictures(20, 2), batch_size=8)
    schedule = OneCycleLR(optimizer, max_lr=0.05, epochs=EPOCHS, steps_per_epoch=len(training))
    net, optimizer, training, testing, schedule = accelerator.prepare(
        net, optimizer, training, testing, schedule
    )
    accelerator.register_for_checkpointing(steps)
    accuracies = []
    for epoch in accelerator.epochs(EPOCHS):
        net.train()
        for pixels, labels in training:
            outputs = net(pixels)
            loss = nn.functional.cross_entropy(outputs, labels)
            accelerator.backward(loss)
            harm("backward")
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps.count += 1
        net.eval()
        right = count = 0
        for pixels, labels in testing:
            with torch.no_grad():
                found = net(pixels).argmax(dim=-1)
            found, labels = accelerator.gather_for_metrics((found, labels))
            right += int((found == labels).sum())
            count += len(labels)
        accuracies.append([epoch, right, count])
        accelerator.print(f"epoch {epoch}: {right} of {count}")
        if "early" in WORDS and epoch == 1:
            accelerator.stop()
    torch.save(
        {
            "model": accelerator.unwrap_model(net).state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "scheduler": schedule.scheduler.last_epoch,
            "rate": optimizer.param_groups[0]["lr"],
            "steps": int(steps.count),
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
            "last": accuracies[-1],
        },
        f"final_{accelerator.process_index}.pt",
    )
    # Else DDP goes last, with the process group: that waits under the GIL for a thread of gloo's, which may wait for it.
    del net
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
