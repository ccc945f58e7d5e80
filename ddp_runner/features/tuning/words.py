"""The command ``bench``, and the options of ``train`` that try something out instead."""

from __future__ import annotations

import re

from ddp_runner.cli.command import Instead
from ddp_runner.cli.commands import Row
from ddp_runner.core.settings.declaration import Option, OptionGroup

BATCH_SIZE, LEARNING_RATE = "--find-batch-size", "--find-lr"
COMMANDS = {
    "bench": Row(
        module="ddp_runner.features.tuning.bench",
        says="measure the parts of a step's time and suggest what to change",
        place=90,
    ),
}
INSTEAD = (
    Instead(
        module="ddp_runner.features.tuning.dry_stages",
        option=Option(
            "--dry-run",
            aliases=("--test-model",),
            group=OptionGroup.TRYING_OUT,
            says="build the model, compute one micro-batch, show modules and memory; write nothing",
        ),
    ),
    Instead(
        module="ddp_runner.features.tuning.find_batch_size",
        value=re.compile(r"-?\d*\.?\d+%?"),
        option=Option(
            BATCH_SIZE,
            metavar="[SHARE]",
            group=OptionGroup.TRYING_OUT,
            says="try batch sizes with a few steps each, and show the largest that needs at "
            "most SHARE of the memory [0.8]",
        ),
    ),
    Instead(
        module="ddp_runner.features.tuning.find_learning_rate",
        value=re.compile(r"[\d.eE+-]+:[\d.eE+:-]+"),
        option=Option(
            LEARNING_RATE,
            metavar="[LOW:HIGH[:STEPS]]",
            group=OptionGroup.TRYING_OUT,
            says="train a copy at increasing learning rates, and show the curve and a "
            "suggestion [1e-7:10:100]",
        ),
    ),
)
