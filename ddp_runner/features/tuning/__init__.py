"""Looks for settings by short trials: what fits, at which rate, what a step costs, whether a rank can be built."""
