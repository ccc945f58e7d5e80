"""Samples that are read once into memory that all ranks share. Never decides whether there is room."""
