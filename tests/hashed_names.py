"""Names whose sets have another order in another launch, as those of text have by Python's hash seed.

That seed is read when an interpreter starts; this one in a launch that is a fork, too.
"""

from __future__ import annotations

import os
import zlib

NAME_SEED = "NAME_SEED"


class Name(str):
    """A name that hashes by a variable of the environment."""

    __slots__ = ()

    def __hash__(self):
        return zlib.crc32(f"{os.environ.get(NAME_SEED)} {self}".encode())
