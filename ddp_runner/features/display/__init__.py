"""Draws a run on a terminal. Without it, lines are written."""
