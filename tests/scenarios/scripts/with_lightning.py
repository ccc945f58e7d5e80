"""A LightningModule and its Trainer, as the documentation has them: checkpoints by callback, ``ckpt_path="last"``."""

import time

import lightning as L  # noqa: N812 - as its documentation has it
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        time.sleep(0.02)
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_start(self):
        print(f"begins at epoch {self.current_epoch}", flush=True)

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch} ends", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    L.seed_everything(3)
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=6,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint("out", save_last=True)],
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=8, shuffle=True), ckpt_path="last")


if __name__ == "__main__":
    main()
