"""A rank's process from fork to exit, and the zygote that forks it."""
