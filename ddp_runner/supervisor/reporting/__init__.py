"""RECORDS: what happened, for files and screens. Changes nothing of the run."""
