"""TEXT: a corpus of files as a dataset of bytes."""
