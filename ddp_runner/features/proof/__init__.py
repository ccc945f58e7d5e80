"""Recomputes a step of a rank in the background, to prove that a replacement would compute the same."""
