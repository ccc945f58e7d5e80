"""Graphs of objects and plain values: what a rank holds outside its model."""
