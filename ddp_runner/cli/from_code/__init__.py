"""Offers Python programs launch(), its coroutine, and the commands as functions."""
