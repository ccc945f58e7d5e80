"""The header of a copy of the state in memory: what a supervisor, which never imports torch, reads of one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ddp_runner.kernel.rules.election import EMPTY_STEP

HEADER_BYTES = 4096
EMPTY_HEADER = b"\0" * HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """The header of a complete slot; ``checksum`` is over the payload and its description."""

    step: int
    sealed: int  # counts up: the newest has the highest
    payload_bytes: int
    described_bytes: int
    checksum: str

    def to_bytes(self) -> bytes:
        """Return the header as it stands in a slot."""
        text = json.dumps(asdict(self)).encode()
        sealed = hashlib.sha256(text).hexdigest().encode() + b" " + text
        return sealed.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, header: bytes) -> SlotHeader | None:
        """None of a slot that holds nothing whole."""
        digest, _, text = header.rstrip(b"\0").partition(b" ")
        if not text or hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        return cls(**json.loads(text))


def step_in_memory(descriptors: Sequence[int]) -> int:
    """Return the step of the newest complete copy in these slots, by their headers; EMPTY_STEP if there is none."""
    found = [SlotHeader.from_bytes(os.pread(one, HEADER_BYTES, 0)) for one in descriptors]
    whole = [header for header in found if header is not None]
    return max(whole, key=lambda header: header.sealed).step if whole else EMPTY_STEP


def clear_slots(descriptors: Sequence[int]) -> None:
    """Mark these slots as empty: nobody may go on from what they hold."""
    for one in descriptors:
        if os.fstat(one).st_size:
            os.pwrite(one, EMPTY_HEADER, 0)
