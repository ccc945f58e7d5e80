"""Has Ray's cluster place and restart the machines of a run."""
