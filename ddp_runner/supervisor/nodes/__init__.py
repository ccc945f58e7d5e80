"""The other machines of a run: their links, the coordinator's view of them, and the follower on each."""
