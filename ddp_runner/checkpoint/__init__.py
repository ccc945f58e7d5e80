"""KEEPS: a checkpoint that was announced can always be read again. Never decides when to save.

``manifest``, ``disk``, ``publish`` and ``catalog`` import no torch: the supervisor reads them too.
"""
