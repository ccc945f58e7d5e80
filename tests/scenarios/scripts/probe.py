"""Says what a program finds around it, by its own account: one line of JSON for each rank."""

import atexit
import json
import os
import random
import sys
import threading
import time

import numpy as np
import torch

out = {
    "argv": sys.argv,
    "file": __file__,
    "name": __name__,
    "spec": __spec__ is None,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "path0": sys.path[0],
    "env": {
        k: v
        for k, v in os.environ.items()
        if k.startswith(("TORCHELASTIC", "ROLE", "GROUP")) or k.endswith(("RANK", "WORLD_SIZE"))
    },
    "async_errors": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "threads": torch.get_num_threads(),
    "numpy": float(np.random.rand()),
    "random": random.random(),
    "torch": torch.rand(()).item(),
    "stdin": sys.stdin.read(),
}


def late():
    time.sleep(0.3)
    with open(f"rank_{os.environ['RANK']}.json", "w") as file:
        json.dump(out, file)


threading.Thread(target=late).start()
atexit.register(lambda: open(f"atexit_{os.environ['RANK']}", "w").close())
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
