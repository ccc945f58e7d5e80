"""A loop of a framework's own, which is repaired in place under ``run`` and is the framework's own under torchrun.

    framework_loop.py FRAMEWORK STEPS STEP_MS

Each rank writes a line for each step to ``steps_RANK.txt``: its process and the time.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FRAMEWORK, STEPS, STEP_MS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
RANK = os.environ.get("RANK", "0")


class Tokens(Dataset):
    """Random sequences, as many as are taken in one epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, 50, (8 * STEPS, 9), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Noted:
    """Writes when each step has ended, and has each take so long."""

    def __init__(self) -> None:
        self._file = open(f"steps_{RANK}.txt", "a")  # noqa: SIM115, PTH123 - as long as the process

    def step(self) -> None:
        self._file.write(f"{os.getpid()} {time.monotonic()}\n")
        self._file.flush()

    def body(self) -> None:
        time.sleep(STEP_MS / 1000)  # of a device: the cores stay free


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def by_transformers(noted: Noted) -> None:
    """Train by ``Trainer``."""
    from transformers import TrainerCallback, TrainingArguments

    from ddp_runner.integrations.transformers import Trainer

    class Paced(Trainer):  # type: ignore[misc,valid-type]
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            noted.body()
            return super().compute_loss(*args, **named)

    class Steps(TrainerCallback):
        def on_step_end(self, *_args: Any, **_named: Any) -> None:
            noted.step()

    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
    )
    Paced(model=gpt2(), args=arguments, train_dataset=Tokens(), callbacks=[Steps()]).train()


def by_accelerate(noted: Noted) -> None:
    """Train in a loop over what ``Accelerator`` has prepared."""
    from ddp_runner.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Tokens(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in accelerator.epochs(1, max_steps=STEPS):
        for batch in loader:
            with accelerator.accumulate(model):
                noted.body()
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                noted.step()


def by_lightning(noted: Noted) -> None:
    """Fit a small CNN with BatchNorm."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback

    from ddp_runner.integrations.lightning import InPlaceDDP

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
                nn.Linear(8 * 36, 2),
            )

        def training_step(self, batch: Any, _: int) -> Any:
            noted.body()
            pictures = batch["input_ids"].float().repeat(1, 8)[:, :64].reshape(-1, 1, 8, 8)
            return self.net(pictures).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Steps(Callback):
        def on_train_batch_end(self, *_args: Any, **_named: Any) -> None:
            noted.step()

    trainer = Trainer(
        strategy=InPlaceDDP(),
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=1,
        max_steps=STEPS,
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[Steps()],
        logger=False,
    )
    trainer.fit(Net(), DataLoader(Tokens(), batch_size=4, shuffle=True))


if __name__ == "__main__":
    {"transformers": by_transformers, "accelerate": by_accelerate, "lightning": by_lightning}[
        FRAMEWORK
    ](Noted())
