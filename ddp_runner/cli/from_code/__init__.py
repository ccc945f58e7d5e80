"""What a Python program calls: launch(), its coroutine, and the commands as functions."""
