"""The bytes that say where the coordinator now is."""

from __future__ import annotations

import os

from ddp_runner.features.machines.letters import endpoint_bytes, read_endpoint


def test_what_was_written_last_is_read_whole():
    """Also after a longer one, and by who inherited the descriptor, as often as it likes."""
    descriptor = os.memfd_create("endpoint")
    try:
        assert read_endpoint(descriptor) is None  # nobody has said anything yet
        for host, port in (("a-very-long-name.example.org", 29_400), ("10.0.0.2", 5), ("::1", 80)):
            os.pwrite(descriptor, endpoint_bytes(host, port), 0)
            assert read_endpoint(descriptor) == read_endpoint(descriptor) == (host, port)
        os.pwrite(descriptor, b"of another kind", 0)
        assert read_endpoint(descriptor) is None
    finally:
        os.close(descriptor)
    assert read_endpoint(descriptor) is None
    assert read_endpoint(None) is None
