"""EXAMPLES: the built-in tasks, written against the interface that a user's own file uses."""
