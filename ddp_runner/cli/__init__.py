"""ENTERS: the command line; each command reads its words, asks the rooms, prints the answer.

train        a checked LaunchPlan for the supervisor
checkpoints  `checkpoints list|verify`
report       `report`: a run's summary for people
doctor       `doctor`: can this machine train?
checks       what it says of one thing
gpu_checks   what nvidia-smi tells of GPUs, and which libraries are known to be bad
probing      has ranks try a repair in a process of their own
demo         `demo`: train in peace and under faults, and compare the weights
check        `check`: the same for a task of the user's, as a table of what holds
scratch      the temporary folder of both, and signals that end them
acts         the faults of the demo, and the settings of its runs
repairs      a journal's incidents, as values
tables       the demo's tables of them
options      the options of `train` as a table
parser       words -> files and assignments, with did-you-mean
usage        the help texts, made from the tables
arguments    the few options of the small commands
devices      visible GPUs, and the place of each rank
machine      cores and the installed torch's build

Nothing here imports torch. Wrong input is a BadInputError; `__main__` prints it and exits 2.
"""
