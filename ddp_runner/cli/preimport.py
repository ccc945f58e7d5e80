"""Imports torch from the first moment of a launch on, before its words are judged. Never judges any.

Errors of a launch are found as before; then, and if the run needs other variables than were
guessed here, the import was in vain, on a core that was idle anyway.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from ddp_runner.cli.hardware.machine import AUTO_CPU_RANKS, core_count, share_of_cores
from ddp_runner.core.launch_plan import NNODES, TRAINED
from ddp_runner.kernel.processes.zygote_start import ZygoteAhead
from ddp_runner.system.environment import training_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# With these it is another process that trains, or none.
_NO_TRAINING = frozenset(
    {
        *("h", "help", "help_settings", "version", "dry_run", "find_batch_size", "find_lr"),
        *("nnodes", "node_rank", "rdzv_endpoint", "engine"),
    }
)
_OF_RANKS = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "DDP_RUNNER_PLAIN_RANK", *NNODES)
_RANKS = frozenset({"n", "nproc_per_node", "nproc"})
_THREADS = frozenset({"threads_per_rank"})
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")


def start(words: Sequence[str], environment: Mapping[str, str]) -> ZygoteAhead | None:
    """Start a zygote in advance for ``train`` with these words; None if they ask for no training by this process.

    The caller ends the process. None too if no process can be started: the launch tries again and reports it.
    """
    names = {_name(word) for word in words}
    if names & _NO_TRAINING or any(name in environment for name in _OF_RANKS):
        return None
    threads = _threads(
        words,
        on_cpu="cpu" in names or not any(map(os.path.exists, _DRIVERS)),
        own=environment.get("OMP_NUM_THREADS", ""),
    )
    try:
        return ZygoteAhead(f"{TRAINED}:", training_environment(environment, threads=threads))
    except OSError:
        return None


def _threads(words: Sequence[str], *, on_cpu: bool, own: str) -> int:
    """Return the number of threads of a rank, as most runs have them."""
    cores = core_count()
    ranks = _number(words, _RANKS) or min(AUTO_CPU_RANKS, cores)
    return _number(words, _THREADS) or share_of_cores(cores, ranks=ranks, on_cpu=on_cpu, own=own)


def _name(word: str) -> str:
    """Return the name of an option or a setting, without its section."""
    return word.partition("=")[0].lstrip("-").replace("-", "_").rpartition(".")[2]


def _number(words: Sequence[str], names: frozenset[str]) -> int:
    """The last one that is given by these names; 0 where there is none."""
    found = 0
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if _name(word) in names:
            text = word.partition("=")[2] if "=" in word else following
            found = int(text) if text.isdecimal() else 0
    return found
