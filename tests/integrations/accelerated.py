"""A loop like that of run_clm_no_trainer, with one import of ours and epochs(); words say what it does. Harm is at hand.

Under torchrun, and by plain python, the same file is accelerate's own Accelerator.
"""

import json
import math
import os
import sys
from dataclasses import dataclass

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from ddp_runner.integrations.accelerate import Accelerator

WORDS = sys.argv[1:]
EPOCHS = 11 if "long" in WORDS else 3


class Tokens(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 50, (count, 9), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index].clone()
        if "masked" in WORDS:
            row[torch.rand(9) < 0.2] = 0
        return {"input_ids": row, "labels": self.rows[index]}


@dataclass
class Output:
    loss: torch.Tensor


class TinyLM(nn.Module):
    """Has the outputs of a model of transformers, whose import takes seconds."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.layer = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids, labels):
        hidden, _ = self.layer(self.tokens(input_ids))
        logits = self.head(hidden[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss=loss)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


class Counter:
    """The six lines: a counter that a replaced rank gets from the others."""

    value = 0

    def state_dict(self):
        if sys._getframe(1).f_code.co_name == "save_custom_state":
            harm("save")  # amid a save: the model is there, and not all of the rest
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def harm(where):
    """Do once what a file ``harm_RANK_STEP_WHERE`` says, if there is one."""
    path = f"harm_{accelerator.process_index}_{completed.value}_{where}"
    if os.path.exists(path):
        with open(path) as file:
            text = file.read()
        os.rename(path, f"done_{path}")
        exec(text)


class HarmedAdam(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        found = super().step(closure)
        harm("update")
        return found


def evaluate():
    model.eval()
    losses = []
    for batch in evaluated:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(2)))
        harm("evaluate")
    model.train()
    return torch.cat(losses).mean().item()


def main():
    global accelerator, completed, model, evaluated
    accelerator = Accelerator(
        cpu="gpu" not in WORDS,
        gradient_accumulation_steps=3 if "accumulate" in WORDS else 1,
        mixed_precision="bf16" if "bf16" in WORDS else "no",
    )
    completed = Counter()
    set_seed(7)
    model = gpt2() if "gpt2" in WORDS else TinyLM()
    optimizer = HarmedAdam(model.parameters(), lr=1e-2)
    trained = DataLoader(Tokens(40, seed=1), batch_size=2, shuffle=True)
    workers = {"num_workers": 1, "persistent_workers": True} if "masked" in WORDS else {}
    evaluated = DataLoader(Tokens(8, seed=2), batch_size=2, **workers)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / 60))
    model, optimizer, trained, evaluated, schedule = accelerator.prepare(
        model, optimizer, trained, evaluated, schedule
    )
    accelerator.register_for_checkpointing(completed)
    steps = EPOCHS * math.ceil(len(trained) / accelerator.gradient_accumulation_steps)
    if "short" in WORDS:
        steps -= 2
    history = []
    for epoch in accelerator.epochs(EPOCHS, max_steps=steps):
        model.train()
        for batch in trained:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                harm("forward")
                loss.register_hook(lambda _: harm("backward"))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    mean = accelerator.gather(loss.detach()).mean()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed.value += 1
                harm("log")
                history.append(mean.item())
                if completed.value % 2 == 0:
                    accelerator.save_state(f"out/step_{completed.value}")
            if completed.value >= steps:
                break
        history.append([epoch, evaluate()])
    accelerator.wait_for_everyone()
    bare = accelerator.unwrap_model(model)
    accelerator.save_model(model, "final")
    torch.save(
        {
            "model": bare.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "scheduler": schedule.state_dict(),
            "rate": optimizer.param_groups[0]["lr"],
            "step": completed.value,
        },
        f"final_{accelerator.process_index}.pt",
    )
    with open(f"history_{accelerator.process_index}.json", "w") as file:
        json.dump(history, file)


if __name__ == "__main__":
    main()
