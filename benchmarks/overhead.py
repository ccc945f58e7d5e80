"""What the supervisor costs while training: resident memory, and its share of one core.

Run by hand: ``python benchmarks/overhead.py [--seconds 20] [--displays plain live] [--json FILE]``.
``live`` runs on a pseudo-terminal of 120 x 40 that is read as a terminal would. Counted is the one
process that the user started; its zygote and store are idle after the start and shown beside it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contenders import RANKS, SIZES, Contender, end_by_signal, machine, show_machine

if TYPE_CHECKING:
    import psutil

STEPS_FOR_EVER = 1_000_000
WARM_UP_LINES = 3
_MB = 1e6


class Terminal:
    """A pseudo-terminal whose other side is read and counted."""

    def __init__(self) -> None:
        self._reader, self.descriptor = pty.openpty()
        size = struct.pack("HHHH", 40, 120, 0, 0)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)
        self.read_bytes = 0
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._reader, 65536)
            except OSError:  # nobody holds the other side any more
                return
            self.read_bytes += len(data)

    def close(self) -> None:
        os.close(self.descriptor)
        self._thread.join()
        os.close(self._reader)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure(display: str, *, seconds: float) -> dict:
    terminal = Terminal() if display == "live" else None
    try:
        with Contender(
            "ddp_runner",
            SIZES["small"],
            steps=STEPS_FOR_EVER,
            settings=(f"log.display={display}",),
            terminal=-1 if terminal is None else terminal.descriptor,
        ) as contender:
            contender.wait_for_lines(WARM_UP_LINES)
            supervisor = contender.process
            before_s, shown_before = cpu_s(supervisor), terminal.read_bytes if terminal else 0
            began_s, first_step = time.monotonic(), contender.lines()[-1]["step"]
            time.sleep(seconds)
            took_s = time.monotonic() - began_s
            used_s = cpu_s(supervisor) - before_s
            memory = supervisor.memory_full_info()
            return {
                "display": display,
                "rss_mb": memory.rss / _MB,
                "uss_mb": memory.uss / _MB,
                "core_share": used_s / took_s,
                "shown_bytes_per_s": (terminal.read_bytes - shown_before) / took_s
                if terminal
                else None,
                "steps": contender.lines()[-1]["step"] - first_step,
                "others": [
                    {"name": each.name(), "rss_mb": each.memory_info().rss / _MB}
                    for each in contender.tree()[1:]
                    if not each.name().startswith(("ddp:rank", "pt_data"))
                ],
            }
    finally:
        if terminal is not None:
            terminal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--displays", nargs="+", default=["none", "plain", "live"])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    end_by_signal()
    facts = machine()
    show_machine(facts)
    print(
        f"\n{RANKS} ranks\n{'display':<9}{'RSS MB':>8}{'USS MB':>8}{'% of a core':>13}{'steps':>7}"
    )
    rows = []
    for display in asked.displays:
        row = measure(display, seconds=asked.seconds)
        rows.append(row)
        print(
            f"{display:<9}{row['rss_mb']:>8.1f}{row['uss_mb']:>8.1f}"
            f"{row['core_share'] * 100:>13.2f}{row['steps']:>7}"
        )
    others = ", ".join(f"{each['name']} {each['rss_mb']:.0f} MB" for each in rows[0]["others"])
    print(f"beside it: {others}")
    if asked.json:
        asked.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
