"""A model's replica under DDP: its loss, its sums over ranks, and what all ranks agree on in them."""
