"""A store in which only values count that a rank of this generation wrote. Never sends the secret.

Any local user can reach the store on loopback: list its keys, write and delete values. So the
supervisor hands every rank a secret with each generation, over the control channel. From it come the
names of the keys, and a signature (HMAC-SHA256) of each value under its full name: what somebody else
wrote there, or put there from another key, is found when it is read. gloo writes its addresses
through the same store, so that a rank connects to ranks of its own generation only; that whoever
connects to *it* is one of them is proved by :func:`proof` once the connections are there.
What remains: who deletes or overwrites values can hold a generation up, or break it.
"""

from __future__ import annotations

import hmac
import time
from collections import deque
from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import Store

from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind, Origin

LOOK_EVERY_S = 1.0  # while a value is awaited: whether one's own are still there
_OWN_KEPT = 16  # the newest ones; who deletes at random hits one of them soon
_SIGNATURE_BYTES = 32
_DIGEST = "sha256"


def key_prefix(secret: str, generation: int) -> str:
    """Return the prefix of this generation's keys; it cannot be guessed without ``secret``."""
    if not secret:
        return f"generation_{generation}"
    return f"generation_{generation}_{_signature(secret, 'keys', b'').hex()[:32]}"


def proof(secret: str, *, of: int, to: int) -> bytes:
    """Return the signature by which rank ``of`` proves its identity, and that it has the secret, to rank ``to``."""
    return _signature(secret, f"rank {of} to {to}", b"")


def tampered(what: str) -> FaultError:
    """The fault that something came from no rank of this run. Nobody's own fault: form again."""
    return FaultError(
        Fault(
            kind=FaultKind.STORE_TAMPERED,
            rank=-1,
            step=0,
            cause=f"another program meddled: {what}",
            origin=Origin.OUTSIDE,
            at_ns=time.monotonic_ns(),
        )
    )


def _signature(secret: str, name: str, value: bytes) -> bytes:
    return hmac.digest(secret.encode(), name.encode() + b"\0" + value, _DIGEST)


class SignedStore(Store):
    """Writes to ``inner`` with signatures and reads from it what is rightly signed.

    Raises FaultError (STORE_TAMPERED), which names the key, for anything else, also through torch's
    C++ code, which does not keep it alive: its owner does. Counters (``add``, ``compare_set``) are passed on as they are: no code of ours uses them.
    """

    def __init__(self, inner: Store, secret: str, *, timeout_s: float) -> None:
        super().__init__()
        self._inner = inner
        self._secret = secret
        self._timeout_s = timeout_s  # of waiting, where the caller names none
        self._own: deque[str] = deque(maxlen=_OWN_KEPT)

    def set(self, key: str, value: str | bytes) -> None:
        """Write ``value`` under ``key``."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        # Bytes are taken as they are; torch's own stub only knows of text.
        self._inner.set(key, cast("str", _signature(self._secret, key, data) + data))
        self._own.append(key)

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits for it."""
        if not self._inner.check([key]):
            self.wait([key])
        return self._proved(key, self._inner.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of ``keys``, asked for at once; waits for all of them."""
        if not keys:
            return []
        # INVARIANT waited-by-us: torch's multi_get is asked only for what is there. Broken if: it
        # waits itself, for as long as the store may take, for a value that was deleted.
        # Guarded by: test_a_value_deleted_by_another_program_ends_the_wait_for_it.
        if not self._inner.check(keys):
            self.wait(keys)
            self._refuse_missing(keys)  # a value that came and went ends the wait, too
        found = self._inner.multi_get(keys)
        return [self._proved(key, signed) for key, signed in zip(keys, found, strict=True)]

    def _proved(self, key: str, signed: bytes) -> bytes:
        signature, value = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, _signature(self._secret, key, value)):
            raise tampered(f"the value of {key} in the store was written by no rank of this run")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are there. Raises RuntimeError (DistStoreError) at the timeout."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + limit_s
        while True:
            left_s = deadline_s - time.monotonic()
            look_s = max(0.001, min(LOOK_EVERY_S, left_s))
            try:
                self._inner.wait(keys, timedelta(seconds=look_s))
            except RuntimeError:
                if left_s <= LOOK_EVERY_S:
                    raise
                self._look_for_own()  # raises where the connection has ended
            else:
                return

    def _look_for_own(self) -> None:
        """Raise an error if one of this rank's own values was deleted: the awaited ones may be gone, too."""
        for key in self._own:
            self._refuse_missing([key])

    def _refuse_missing(self, keys: list[str]) -> None:
        if self._inner.check(keys):
            return
        gone = next((key for key in keys if not self._inner.check([key])), keys[0])
        raise tampered(f"the value of {gone} was deleted from the store")

    def check(self, keys: list[str]) -> bool:
        """Return True if all ``keys`` are there, whichever rank wrote them."""
        return bool(self._inner.check(keys))

    def add(self, key: str, value: int) -> int:
        """Passed on."""
        return self._inner.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Passed on."""
        return self._inner.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; says whether it was there."""
        if key in self._own:
            self._own.remove(key)
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys in ``inner``."""
        return self._inner.num_keys()
