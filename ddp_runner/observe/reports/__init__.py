"""Makes reports for people from a run's files: lines for a terminal, an HTML page, a comparison of two runs.

``improvements`` has the rules of what to change first. Nothing here reads a file or writes one.
"""
