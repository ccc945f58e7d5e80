"""Holds one folder for each feature: what a run can do without. Deleting a folder deletes the feature.

Nothing outside imports a feature by name: :func:`ddp_runner.installed.parts` finds its files by what they are called.
"""
