"""Keeps per-rank state at each step, and restores it to the same rank only."""
