"""A script as people write it, with one line of ours; words say which of Trainer's options it takes. Harm is at hand.

Under torchrun, and by plain python, the same file is transformers' own Trainer.
"""

import json
import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

WORDS = sys.argv[1:]
if "by_name" in WORDS:
    from transformers import Trainer
else:
    from ddp_runner.integrations.transformers import Trainer

CHOSEN = {
    "accumulate": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "evaluate": {"eval_strategy": "steps", "eval_steps": 2},
    "best": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    },
    "epochs": {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "long": {"max_steps": 16},
    "short": {"max_steps": 7},
    "checkpointing": {"activation_checkpointing": True},
    "workers": {"dataloader_num_workers": 1},
    "persistent": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "metric_for_best_model": "eval_loss",
    },
}


class Tokens(Dataset):
    """``is_even``: each sample has as many tokens, so that it does not matter which are evaluated together."""

    def __init__(self, count, seed, *, is_even=False):
        self.is_even = is_even
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 50, (count, 9), generator=generator)
        self.lengths = torch.randint(3, 9, (count,), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row, labels = self.rows[index].clone(), self.rows[index].clone()
        if not self.is_even:
            labels[self.lengths[index] :] = -100  # so that ranks have different numbers of tokens
        elif "masked" in WORDS:
            row[torch.rand(9) < 0.2] = 0
        return {"input_ids": row, "labels": labels}


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from (self.rows[index] for index in range(len(self.rows)))


def rank():
    return trainer.args.process_index


def harm(where):
    """Do once what a file ``harm_RANK_STEP_WHERE`` says, if there is one."""
    path = f"harm_{rank()}_{trainer.state.global_step}_{where}"
    if os.path.exists(path):
        with open(path) as file:
            text = file.read()
        os.rename(path, f"done_{path}")
        exec(text)


class Events(TrainerCallback):
    """Writes down what it hears, a line an event."""

    def _write(self, event, state):
        if rank() == 0:
            with open("events.txt", "a") as file:
                file.write(f"{state.global_step} {event}\n")

    def on_step_begin(self, args, state, control, **named):
        self._write("begin", state)

    def on_pre_optimizer_step(self, args, state, control, **named):
        self._write("update", state)

    def on_optimizer_step(self, args, state, control, **named):
        harm("update")

    def on_step_end(self, args, state, control, **named):
        self._write("end", state)
        harm("callback")

    def on_log(self, args, state, control, logs, **named):
        if "loss" in logs:
            harm("log")

    def on_evaluate(self, args, state, control, **named):
        self._write("evaluate", state)
        harm("evaluate")


class Average(TrainerCallback):
    """The mean of the weights of all steps, which the model has at the end."""

    def on_train_begin(self, args, state, control, model, **named):
        self.weights = {name: one.detach().clone() for name, one in model.named_parameters()}

    def on_step_end(self, args, state, control, model, **named):
        for name, one in model.named_parameters():
            self.weights[name].lerp_(one.detach(), 1 / (state.global_step + 1))

    def on_train_end(self, args, state, control, model, **named):
        model.load_state_dict(self.weights, strict=False)


class Own(Trainer):
    def get_train_dataloader(self):
        if "own_loader" not in WORDS:
            return super().get_train_dataloader()
        batches = DataLoader(
            self.train_dataset, batch_size=2, shuffle=True, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(batches)

    def compute_loss(self, model, inputs, *args, **named):
        if not model.training:
            return super().compute_loss(model, inputs, *args, **named)
        harm("forward")
        loss = super().compute_loss(model, inputs, *args, **named)
        loss.register_hook(lambda _: harm("backward"))
        return loss

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        harm("save")


def main():
    global trainer
    set_seed(7)
    config = GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = GPT2LMHeadModel(config)
    if "lora" in WORDS:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )
    chosen = {key: value for word in WORDS for key, value in CHOSEN.get(word, {}).items()}
    arguments = {
        "output_dir": "out",
        "use_cpu": "gpu" not in WORDS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **chosen,
    }
    callbacks = [Events(), *([Average()] if "average" in WORDS else [])]
    if "early" in WORDS:
        callbacks.append(
            EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)
        )
    rows = Tokens(30, seed=1)
    trainer = Own(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=Stream(rows) if "stream" in WORDS else rows,
        eval_dataset=Tokens(8, seed=2, is_even=True),
        callbacks=callbacks,
    )
    if "fp16" in WORDS:
        from tests.integrations.compared import in_fp16

        in_fp16(trainer.accelerator)
    last = "out/checkpoint-2" if "resume" in WORDS else None
    trained = trainer.train(resume_from_checkpoint=last)
    seen = trainer.predict(Tokens(8, seed=3)) if "predict" in WORDS else None
    if "save" in WORDS:
        trainer.save_model("final")
    history = [
        {k: v for k, v in one.items() if not k.endswith(("_runtime", "_per_second", "_time"))}
        for one in trainer.state.log_history
    ]
    torch.save(
        {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict()["state"],
            "scheduler": trainer.lr_scheduler.state_dict().get("last_epoch"),
            "rate": trainer.optimizer.param_groups[0]["lr"],
            "scaler": trainer.accelerator.scaler and trainer.accelerator.scaler.state_dict(),
            "predictions": None if seen is None else torch.tensor(seen.predictions),
        },
        f"final_{rank()}.pt",
    )
    facts = {
        "history": history,
        "step": trained.global_step,
        "loss": trained.training_loss,
        "flos": trainer.state.total_flos,
        "best": [
            trainer.state.best_metric,
            trainer.state.best_global_step,
            trainer.state.best_model_checkpoint,
        ],
    }
    with open(f"facts_{rank()}.json", "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main()
