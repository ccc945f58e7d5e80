"""Evaluates a checkpoint and writes its predictions, in one process."""
