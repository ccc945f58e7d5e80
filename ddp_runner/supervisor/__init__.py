"""PARENT: spawns, watches, decides by rules, acts. Knows no torch.

processes    the processes of this machine: forked, killed, reaped, read
recovery     from the first sign of a fault to ranks that train again
reporting    what happened, for files and screens
script       a program of the user's own: all ranks are started again where one is lost

Here stand the loop, the supervisor that acts on each event, and how a run ends. In every room the first
line of a file says what it is for.
"""
