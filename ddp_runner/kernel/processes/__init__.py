"""NODE: the processes of this machine: forked, killed, reaped, read. Decides nothing."""
