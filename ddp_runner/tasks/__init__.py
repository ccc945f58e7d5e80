"""EXAMPLES: the built-in tasks, written against the interface that a user's own file uses.

transformer  the decoder-only language model of both      bytes_lm   bytes of real text (default)
synthetic    sequences made up on the fly, no files
"""
