"""HOLDS: what both sides of a run need of the operating system. Knows nothing of training, nor of repair."""
