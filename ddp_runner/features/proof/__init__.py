"""Computes a step of a rank once more, beside the run, to prove that a replacement would compute the same."""
