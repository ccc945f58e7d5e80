"""transformers' Trainer on a small model of its own, as its examples have it: ``get_last_checkpoint`` and resume."""

import os
import time

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Sentences(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 100, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids.sum() % 2}


def main():
    config = BertConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=8,
        num_train_epochs=6,
        save_strategy="epoch",
        save_total_limit=2,
        logging_steps=8,
        report_to=[],
        disable_tqdm=True,
    )
    last = get_last_checkpoint("out") if os.path.isdir("out") else None
    if last:
        print(f"resumes {last}", flush=True)
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=arguments, train_dataset=Sentences()
    )
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model("final")


if __name__ == "__main__":
    main()
