"""Runs a rank that another launcher has started: torchrun, srun, a Kubernetes job."""
