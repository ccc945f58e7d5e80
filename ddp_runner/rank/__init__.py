"""RANK: a supervised process of the run, from fork to exit.

zygote      imports torch once and forks the rest          store_host  hosts the TCPStore
process     what a forked rank does before and after       runtime     the trainer's surroundings
injection   carries out injected faults                    outside     a rank of torchrun or srun
signals     who takes a stop                               told        what outlives such a rank's restart
faulty_disk what injected faults do to saving              fenced_disk no save of a rank that is declared dead
spare       a rank to be, warm and asleep                  probe       a repair in small, for `doctor`
cuda_driver starts CUDA for a spare, opening no GPU
"""
