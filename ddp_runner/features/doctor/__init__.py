"""Checks whether this machine can train, and says what to do where it cannot."""
