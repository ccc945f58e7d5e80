"""The supervisors of a run on several machines: the coordinator's and the followers'."""
