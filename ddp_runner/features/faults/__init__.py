"""Causes faults on request (``--inject``), to see them repaired."""
