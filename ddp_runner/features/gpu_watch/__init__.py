"""Asks the driver of GPUs how they are, in a process of its own."""
