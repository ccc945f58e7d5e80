"""ENTERS: the command line; each command reads its words, asks the rooms, prints the answer.

Nothing here imports torch. Wrong input is a BadInputError; ``commands`` prints it and exits 2.
"""
