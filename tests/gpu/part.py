"""The process of one part: ``python -m tests.gpu.part MODULE LIMIT_S PARENT DESCRIPTOR``."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
import traceback

from ddp_runner.kernel.system import parent_death
from ddp_runner.system.torch_versions import torch_build
from tests.gpu import driver
from tests.gpu.conducting import STACKS_SIGNAL
from tests.gpu.facts import Facts, error_text, rehearses

SPARED_S = 1.5  # of its limit: a part knows that it has to come to its end


def why_not(module):
    """Why the part cannot measure here; "" where it can."""
    if not getattr(module, "NEEDS_GPU", True) or rehearses():
        return ""
    why = driver.why_no_device()
    if why:
        return why
    build = torch_build()  # read from its files: importing it is a measurement
    if build is None or not build.cuda:
        return f"{driver.NO_DEVICE} (torch is built without CUDA: {build})"
    return ""


def main(arguments):
    """The exit code; what went wrong is reported by the outcome."""
    name, limit_s, parent, descriptor = arguments
    begun_s = time.monotonic()
    parent_death.die_with_parent(int(parent))
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    facts = Facts(int(descriptor), deadline_s=begun_s + float(limit_s) - SPARED_S)
    try:
        module = importlib.import_module(name)
        why = why_not(module)
        if why:
            facts.outcome("skipped", why)
        else:
            module.measure(facts)
    except Exception as error:  # noqa: BLE001 - the error is the outcome
        traceback.print_exc()
        facts.outcome("failed", error_text(error))
        return 1
    return 0


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
