"""Shows and proves the promise: ranks are ended on purpose, and the weights come out the same."""
