"""The objects that each rank has of its own: kept at each step, and given back to just that rank."""
