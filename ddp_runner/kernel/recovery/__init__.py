"""REPAIRS: from the first sign of a fault to ranks that train again. Rules are in kernel/rules."""
