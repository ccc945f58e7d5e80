"""A training loop that is the user's own: what it keeps, its batches, its steps, and what it is given to call."""
