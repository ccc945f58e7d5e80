"""Runs a script: its ranks are started together, and all again where one is lost."""
