"""SHOWS: what people and scripts see of a run. Decides nothing, knows no torch, never stops a run."""
