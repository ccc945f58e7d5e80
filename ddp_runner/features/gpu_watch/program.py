"""The process that asks a GPU driver for a supervisor, which a call that hangs must not stop. It may be killed."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Sequence

from ddp_runner.observe.gpu_watch import NoDriverError, driver_reader
from ddp_runner.system import parent_death

NO_DRIVER = 4  # exit code: there is nobody to ask here, and another attempt finds nobody either
_NICE = 5  # ranks come first


def main(words: Sequence[str]) -> int:
    """``INTERVAL_S PARENT_PID``: a line of JSON, the GPUs' records, at once and then each interval.

    Ends with its parent, and once standard input is closed.
    """
    interval_s, parent = float(words[0]), int(words[1])
    parent_death.die_with_parent(parent)
    parent_death.set_process_name("ddp:gpu-watch")
    os.nice(_NICE)
    try:
        reader = driver_reader()
    except NoDriverError as error:
        sys.stderr.write(f"{error}\n")
        return NO_DRIVER
    closing = select.poll()  # of any descriptor: select() takes none from 1,024 on
    closing.register(0, select.POLLIN | select.POLLHUP)
    while True:
        record = [gpu.to_record() for gpu in reader.read()]
        os.write(1, json.dumps(record).encode() + b"\n")
        if closing.poll(interval_s * 1e3) and not os.read(0, 64):
            reader.close()
            return 0
