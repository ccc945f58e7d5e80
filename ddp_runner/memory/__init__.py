"""WATCHES: how much memory a rank and its loader workers use, and what is done about it.

The rules (levels, hysteresis, what is a leak) are in ``manager`` and ``core.memory_leak``.
"""
