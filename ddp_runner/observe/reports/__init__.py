"""What is made of a run's files for people: lines for a terminal, one page to send, a comparison of two runs.

``improvements`` has the rules of what to change first. Nothing here reads a file or writes one.
"""
