"""Engines that place supervisors on machines, and restart them elsewhere: their drivers, and what runs on a machine."""
