"""JOINS: one process group per generation, its abort, the DDP replica, state between ranks."""
