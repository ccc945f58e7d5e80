"""A user's values: nested containers, their plain form, random generators, and objects that hold others."""
