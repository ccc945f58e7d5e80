"""FEEDS: which samples a step takes, the workers that load them, and their repair. Never trains.

workers      the processes that load samples, and how their batches arrive
text         a corpus of files as a dataset of bytes

``order`` says which samples a step takes; ``loader`` and ``stream`` serve them.
"""
