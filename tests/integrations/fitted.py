"""A script as people write it for Lightning, with one line of ours; words say which options it takes. Harm is at hand.

Under torchrun the same file trains by Lightning's own DDPStrategy.
"""

import json
import os
import sys
from collections import deque

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from ddp_runner.integrations.lightning import InPlaceDDP

WORDS = sys.argv[1:]
RANK = int(os.environ.get("RANK", "0"))


def harm(where, trainer):
    """Do once what a file ``harm_RANK_STEP_WHERE`` says, if there is one."""
    path = f"harm_{RANK}_{trainer.global_step}_{where}"
    if os.path.exists(path) and not trainer.sanity_checking:
        with open(path) as file:
            text = file.read()
        os.rename(path, f"done_{path}")
        exec(text)


def pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 8, 8, generator=generator)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


class Noisy(Dataset):
    """Draws noise for each sample."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return x + 0.5 * torch.randn(x.shape), y


class Net(LightningModule):
    """A small CNN with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            nn.Linear(4 * 36, 2),
        )
        self.seen = 0
        self.outputs = []
        self.recent = deque()
        self.accuracy = MulticlassAccuracy(2)
        self.evaluated = MeanMetric()

    def training_step(self, batch, batch_idx):
        harm("forward", self.trainer)
        x, y = batch
        scores = self.net(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.seen += len(x)
        self.outputs.append(float(loss.detach()))
        if "unkept" in WORDS:
            self.recent.append(batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own_loss", loss, on_step=False, on_epoch=True)
        harm("log", self.trainer)
        return loss

    def on_after_backward(self):
        harm("backward", self.trainer)

    def on_train_epoch_end(self):
        self.outputs.clear()

    def validation_step(self, batch, batch_idx):
        harm("validation", self.trainer)
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("val_loss", loss, sync_dist=True)
        self.log("own_val_loss", loss)
        self.evaluated.update(loss)
        self.log("evaluated", self.evaluated)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        if "accumulate" in WORDS:  # which asks for the data before training begins
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Events(Callback):
    """Counts what it hears, and does harm."""

    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        harm("optimizer", trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        harm("callback", trainer)
        self.steps.append(trainer.global_step)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        harm("save", trainer)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def main():
    seed_everything(7)
    chosen = {}
    if "accumulate" in WORDS:
        chosen.update(accumulate_grad_batches=2, gradient_clip_val=0.5)
    if "midway" in WORDS:
        chosen.update(val_check_interval=2)
    if "bf16" in WORDS:
        chosen.update(precision="bf16-mixed")
    if "fp16" in WORDS:  # which `precision` would make bf16 of on a CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
        chosen.update(plugins=MixedPrecision("16-mixed", "cpu", scaler))
    events = Events()
    best = ModelCheckpoint("best", monitor="val_loss", save_top_k=2, save_last=True)
    callbacks = [events, best]
    if "early" in WORDS:
        callbacks.append(EarlyStopping("val_loss", patience=2, min_delta=10.0))
    trainer = Trainer(
        strategy=InPlaceDDP(),
        accelerator="gpu" if "gpu" in WORDS else "cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=8 if "long" in WORDS else 5 if "early" in WORDS else 2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        logger=CSVLogger("csv"),
        **chosen,
    )
    module, evaluated = Net(), DataLoader(pictures(20, 2), batch_size=4)
    if "noisy" in WORDS:
        data = Noisy(pictures(20, 2))
        evaluated = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    trainer.fit(module, DataLoader(pictures(40, 1), batch_size=4, shuffle=True), evaluated)
    state = module.state_dict()
    optimizer = trainer.optimizers[0].state_dict()["state"]
    facts = {
        "steps": events.steps,
        "seen": module.seen,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "best": os.path.relpath(best.best_model_path) if best.best_model_path else "",
        "last": os.path.relpath(best.last_model_path) if best.last_model_path else "",
        "train_loss": round(float(trainer.callback_metrics["train_loss_epoch"]), 6),
        "own_loss": float(trainer.callback_metrics["own_loss"]),
        "accuracy": float(trainer.callback_metrics["accuracy_epoch"]),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "own_val_loss": float(trainer.callback_metrics["own_val_loss"]),
        "evaluated": float(trainer.callback_metrics["evaluated"]),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "scaler": trainer.scaler.state_dict() if trainer.scaler else None,
    }
    torch.save({"model": state, "optimizer": optimizer}, f"final_{RANK}.pt")
    with open(f"facts_{RANK}.json", "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main()
