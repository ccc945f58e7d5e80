"""A task that starts programs of its own, as a stranger's would: a data server, a shell's background job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.scenarios.harness import MARK
from tests.scenarios.workload import PacedTask

ENDLESS = "import time; time.sleep(3600)"


class StartingTask(PacedTask):
    """Each rank starts four: one plainly, one by a shell that ends, one without its environment, one fork."""

    def build_model(self):
        print("2026-11-20 19:47:20.123 ERROR   rank 0 | the disk is on fire", flush=True)
        rank = os.environ["RANK"]
        started = [subprocess.Popen([sys.executable, "-c", ENDLESS]).pid]
        # Whose parent has ended when the rank dies: it is the supervisor's already.
        shell = subprocess.run(
            ["sh", "-c", '"$0" -c "$1" >&2 & echo $!', sys.executable, ENDLESS],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        started.append(int(shell.stdout))
        started.append(subprocess.Popen(["sleep", "3600"], env={MARK: os.environ[MARK]}).pid)
        fork = os.fork()
        if fork == 0:
            Path("/proc/self/comm").write_text("forked", encoding="ascii")
            while True:
                time.sleep(3600)
        started.append(fork)
        text = " ".join(map(str, started))
        path = Path(f"started_by_{rank}")
        path.with_suffix(".half").write_text(text, encoding="ascii")
        path.with_suffix(".half").rename(path)
        return super().build_model()
