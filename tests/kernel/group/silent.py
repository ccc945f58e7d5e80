"""A process group on the CPU that is aborted as NCCL is: in silence, with wrong numbers, at the peers too.

What NCCL does, by reading (FACTS F1, NCCL 2.21 to 2.30): a kernel that is aborted posts its remaining
steps to its neighbours, so that a peer which is not aborted yet ends its own sum, with whatever lay in
the buffers; nobody hears of an error. A peer that dies posts nothing: the others wait for ever.

Ranks exchange their tensors over sockets of loopback; every operation has a thread, as it would have a
stream, and begins when the device has come to it (``device``). ``wait`` blocks where a GPU's ``.tolist()`` would.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

BACKEND = "nccl_on_cpu"  # with the name of what it stands for: that is how the product knows it
_FRAME = struct.Struct("<BIQ")  # kind, number, bytes that follow
_SUM, _MESSAGE, _POSTED = range(3)
_HELLO = struct.Struct("<8sI")
_MAGIC = b"silent\0\0"


class Device:
    """Does what it is given one after another, later, while the host goes on: a stream's kernels.

    Nothing ends one of them, no abort either. What a rank computes itself, the host has computed at once.
    """

    def __init__(self):
        self._acts = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._runs = False  # not in the process that ranks are forked from

    def enqueue(self, act, *arguments):
        """Have ``act`` done, and return at once."""
        with self._starting:
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="device", daemon=True).start()
        self._acts.put((act, arguments))

    def comes_here(self):
        """An event that is set when all that it was given has been done."""
        here = threading.Event()
        self.enqueue(here.set)
        return here

    def _run(self):
        while True:
            act, arguments = self._acts.get()
            act(*arguments)


device = Device()  # of this process


class SilentWork(dist.Work):
    """One operation that is under way."""

    def __init__(self, tensor):
        super().__init__()
        self.ended = threading.Event()
        self._future = torch.futures.Future()
        self._tensor = tensor

    def end(self):
        self.ended.set()
        self._future.set_result([self._tensor])

    def wait(self, timeout=None):
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) and timeout else None
        if not self.ended.wait(seconds):
            raise RuntimeError("timed out")
        return True

    def is_completed(self):
        return self.ended.is_set()

    def get_future(self):
        return self._future


class SilentGroup(dist.ProcessGroup):
    """``abort_s``: how long an abort takes, as those of devices may."""

    abort_s = 0.0

    def __init__(self, store, rank, world_size):
        super().__init__(rank, world_size)
        self._changed = threading.Condition()
        self._here = {}  # (kind, number, peer) -> bytes
        self._is_aborted = self._is_posted = False
        self._begun = 0
        self._messages = {}  # (peer, "to" or "from") -> how many
        self._works = []  # C++ alone would keep half of each
        self._sending = {peer: threading.Lock() for peer in range(world_size)}
        self._peers = self._connect(store)
        # What torch's destructor does when an interpreter ends with a group that nobody has destroyed.
        threading._register_atexit(self._abort_at_the_end)
        for peer in self._peers:
            self._start(self._read, peer)

    def getBackendName(self):  # noqa: N802 - torch's name
        return BACKEND

    def _get_backend(self, of):
        del of
        return self

    def _get_sequence_number_for_group(self):
        return self._begun

    def _connect(self, store):
        peers = {}
        with socket.create_server(("127.0.0.1", 0)) as listening:
            store.set(f"silent/{self.rank()}", str(listening.getsockname()[1]))
            for peer in range(self.rank()):
                port = int(store.get(f"silent/{peer}"))
                peers[peer] = socket.create_connection(("127.0.0.1", port))
                peers[peer].sendall(_HELLO.pack(_MAGIC, self.rank()))
            while len(peers) < self.size() - 1:
                connection, _ = listening.accept()
                hello = _read_exactly(connection, _HELLO.size)
                if hello is None or _HELLO.unpack(hello)[0] != _MAGIC:
                    raise RuntimeError("connection closed by peer while forming")
                peers[_HELLO.unpack(hello)[1]] = connection
        return peers

    def allreduce(self, tensors, *options):
        del options
        self._begun += 1
        return self._begin(tensors[0], self._sum, self._begun)

    def broadcast(self, tensors, *options):
        root = options[0].rootRank if options else 0
        self._begun += 1
        return self._begin(tensors[0], self._broadcast, self._begun, root)

    def send(self, tensors, to, tag=0):
        del tag
        number = self._messages[to, "to"] = self._messages.get((to, "to"), 0) + 1
        return self._begin(tensors[0], self._send_message, number, to)

    def recv(self, tensors, source, tag=0):
        del tag
        number = self._messages[source, "from"] = self._messages.get((source, "from"), 0) + 1
        return self._begin(tensors[0], self._receive_message, number, source)

    def abort(self):
        """End what is under way here and at the peers; nobody hears that it was not whole."""
        if self.abort_s:
            threading.Event().wait(self.abort_s)
        for peer in self._peers:
            self._put(peer, _POSTED, 0, b"")
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def _abort_at_the_end(self):
        if not self._is_aborted:
            self.abort()

    def shutdown(self):
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _begin(self, tensor, act, *arguments):
        work = SilentWork(tensor)
        self._works = [one for one in self._works[-64:] if not one.is_completed()] + [work]
        own, here = tensor.detach(), device.comes_here()

        def run():
            here.wait()
            act(own, *arguments)
            work.end()

        self._start(run)
        return work

    def _sum(self, tensor, number):
        for peer in self._peers:
            self._put(peer, _SUM, number, _bytes_of(tensor))
        parts = {self.rank(): tensor.clone()}
        for peer in self._peers:
            parts[peer] = self._await(_SUM, number, peer, like=tensor)
        tensor.copy_(parts[0])
        for rank in range(1, self.size()):  # in one order: the same bits on every rank
            tensor.add_(parts[rank])

    def _broadcast(self, tensor, number, root):
        if root == self.rank():
            for peer in self._peers:
                self._put(peer, _SUM, number, _bytes_of(tensor))
        else:
            tensor.copy_(self._await(_SUM, number, root, like=tensor))

    def _send_message(self, tensor, number, to):
        self._put(to, _MESSAGE, number, _bytes_of(tensor))

    def _receive_message(self, tensor, number, source):
        tensor.copy_(self._await(_MESSAGE, number, source, like=tensor))

    def _await(self, kind, number, peer, *, like):
        """What ``peer`` has sent, or what lies in the buffer when somebody has posted in its place."""
        with self._changed:
            self._changed.wait_for(
                lambda: (kind, number, peer) in self._here or self._is_aborted or self._is_posted
            )
            data = self._here.pop((kind, number, peer), None)
        if data is None:
            return torch.zeros_like(like)  # a sum that lacks a rank is like any other sum
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return flat.view(like.dtype).view(like.shape) if data else torch.empty_like(like)

    def _put(self, peer, kind, number, data):
        # Of who is stopped the buffer may be full; an abort does not wait for him.
        if not self._sending[peer].acquire(timeout=0.2 if kind == _POSTED else -1):
            return
        try:
            with contextlib.suppress(OSError):  # it has died: nothing to report
                self._peers[peer].sendall(_FRAME.pack(kind, number, len(data)) + data)
        finally:
            self._sending[peer].release()

    def _read(self, peer):
        while True:
            head = _read_exactly(self._peers[peer], _FRAME.size)
            if head is None:
                return
            kind, number, length = _FRAME.unpack(head)
            data = _read_exactly(self._peers[peer], length)
            if data is None:
                return
            with self._changed:
                if kind == _POSTED:
                    self._is_posted = True
                else:
                    self._here[kind, number, peer] = data
                self._changed.notify_all()

    def _start(self, act, *arguments):
        threading.Thread(target=act, args=arguments, name="stream", daemon=True).start()


def _read_exactly(connection, length):
    data = bytearray()
    while len(data) < length:
        try:
            more = connection.recv(min(2**20, length - len(data)))
        except OSError:
            return None
        if not more:
            return None
        data += more
    return bytes(data)


def _bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def register():
    """Make the backend known to torch in this process. Idempotent."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, _: SilentGroup(store, rank, size), devices=["cpu"]
        )
