"""The model of ``paced.py`` in a loop of its own that attaches: what ``nodes.py`` compares with a task.

Rank 0 writes a line for each committed step to the file that is its first argument.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from paced import Samples, build_model

import ddp_runner


def main() -> None:
    progress, pace_s = Path(sys.argv[1]), float(sys.argv[2])
    run = ddp_runner.attach()
    model = build_model(2.0)
    optimizer = torch.optim.AdamW(model.parameters())
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    with progress.open("a", encoding="utf-8") as lines:
        for batch in run.steps(run.loader(Samples(), batch_size=8), max_steps=1_000_000):
            before = run.step_number
            with run.step():
                time.sleep(pace_s)
                loss = torch.nn.functional.mse_loss(net(batch), batch.sum(dim=1, keepdim=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if run.is_first and run.step_number > before:
                lines.write(f"{run.step_number}\n")
                lines.flush()


if __name__ == "__main__":
    main()
