"""``python -m tests.gpu --out DIR``: turns minutes on a machine with a GPU into facts (README.md).

``__main__`` the command · ``conducting`` one process with a limit · ``part`` the first lines of such a
process · ``facts`` what it reports, and its forks · ``driver`` the GPU without torch · ``launches`` runs
of the product · ``tasks`` what they train · ``group`` a generation of torch's group by hand · ``sums``
DDP's sums by hand. The parts: ``machine``, ``nccl``, ``two_ranks``, ``shared``, ``one_rank``,
``marked``. Nothing but ``tasks`` imports torch before it is asked to measure.
"""
