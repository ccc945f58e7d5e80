"""Several machines: a coordinator decides, and a follower on each other one performs."""
