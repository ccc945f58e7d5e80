"""A probe whose process comes to no trial: it imports nothing that such a one needs. For tests.

``DDP_TEST_PROBE`` names what it does instead.
"""

from __future__ import annotations

import os
import sys
import time


def main(words):
    """With the words of the probe: the pipe to its parent comes first."""
    if os.environ["DDP_TEST_PROBE"] == "say why":
        sys.exit("ImportError: libcudart.so.12: cannot open shared object file")
    os.write(int(words[0]), b"imported\n")
    time.sleep(600)
