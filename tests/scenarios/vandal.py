"""Another user's program on this machine: it finds a run's ports, as anybody can, and does its worst there.

Each line of its standard input says what to do, ``talk PORT...``, ``overwrite PORT`` or ``delete PORT``,
the line after it that this is enough.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

GARBAGE = (
    b"GET / HTTP/1.0\r\n\r\n",
    b"\x00" * 64,
    b"\xff" * 64,
    b"\x85\x85\x15\x3c\xff\xff\xff\xff",
    random.Random(0).randbytes(4096),
)
IDLE = 200  # connections that say nothing


def _store(port):
    return TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=20))


def _overwrite(store):
    """Every value that is there, and what a run without a secret would read."""
    for key in store.list_keys():
        store.set(key, "[1, 2]")
    for name in ("generation_1/weights/10/1/0", "generation_2/committed_step/1/1"):
        store.set(name, "[1, 2]")


def _delete(store):
    for key in store.list_keys():
        store.delete_key(key)


def _talk(ports):
    """Garbage and silence at each door, and the numbers of gloo's pairs; gives what must stay open."""
    held = []
    for port in ports:
        for said in (*GARBAGE, *(number.to_bytes(8, "little") for number in range(8))):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=5.0) as door,
            ):
                door.sendall(said)
        for _ in range(IDLE // len(ports)):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=5.0))
    return held


def _again_and_again(act, store, stop):
    while not stop.is_set():
        act(store)
        time.sleep(0.001)


def main():
    """Do as each line says, until the next one."""
    held = []
    for line in sys.stdin:
        what, *ports = line.split()
        stop = threading.Event()
        worker = None
        if what == "talk":
            held += _talk([int(port) for port in ports])
        else:
            act = _overwrite if what == "overwrite" else _delete
            how = (act, _store(int(ports[0])), stop)
            worker = threading.Thread(target=_again_and_again, args=how, daemon=True)
            worker.start()
        print("at it", flush=True)
        sys.stdin.readline()
        stop.set()
        if worker is not None:
            worker.join()
        print("done", flush=True)


if __name__ == "__main__":
    main()
