"""RANK: a supervised process of the run, from fork to exit."""
