"""The rules and messages of several machines."""
