"""RANK: a supervised process of the run, from fork to exit.

zygote      imports torch once and forks the rest          store_host  hosts the TCPStore
process     what a forked rank does before and after       runtime     the trainer's surroundings
injection   carries out injected faults                    outside     a rank of torchrun or srun
faulty_disk what injected faults do to saving              told        what outlives such a rank's restart
"""
