"""WORKERS: the processes that load samples, and how their batches arrive. None restarts them."""
