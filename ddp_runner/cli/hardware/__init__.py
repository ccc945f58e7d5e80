"""The devices and limits of this machine, and whether they fit a run."""
