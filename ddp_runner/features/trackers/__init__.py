"""Writes the points of a run to trackers, in processes of their own that follow its files."""
