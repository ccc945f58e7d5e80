"""What a training writes: checkpoints while it runs, the last one, and the final weights."""
