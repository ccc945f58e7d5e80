"""PROVES: what a step changes, and whether a repeated one comes to the same. None repairs."""
