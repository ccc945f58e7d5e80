"""Reports on a run from its files: to a terminal, as a page in one file, or compared with another run."""
