"""Temporary files as a writer that was killed leaves them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_WRITE = """
import sys
from pathlib import Path
from ddp_runner.kernel.system.run_files import temporary_path
path = temporary_path(Path(sys.argv[1]))
path.write_text("half")
print(path)
"""


def of_a_dead_writer(path):
    """What a process that has ended by now wrote in place of ``path``."""
    made = subprocess.run(
        [sys.executable, "-c", _WRITE, str(path)], capture_output=True, text=True, check=True
    )
    return Path(made.stdout.strip())
