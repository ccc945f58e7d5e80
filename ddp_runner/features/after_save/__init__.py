"""Runs a command of the user's for each checkpoint, beside training."""
