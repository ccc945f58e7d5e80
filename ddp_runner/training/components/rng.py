"""Keeps the import path that :func:`seed_all` had before it moved to ``kernel/values/generators.py``."""

from ddp_runner.kernel.values.generators import seed_all

__all__ = ["seed_all"]
