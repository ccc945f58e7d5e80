"""The supervisor of a run: what it hears, what it knows of ranks, and what it decides."""
