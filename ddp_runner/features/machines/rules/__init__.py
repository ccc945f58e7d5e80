"""The rules of a run on several machines, and their messages. Pure."""
