"""A run as its files show it, of now or of long ago: curves, faults, timeline. Reads; shows nothing, writes nothing.

``run_history`` reads a folder with the others' help: ``metrics_history`` the curves, ``fault_rows`` and
``timeline`` what became of the ranks. ``thinning`` and ``figures`` make of it what is drawn.
"""
