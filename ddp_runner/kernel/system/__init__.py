"""Calls of the operating system: processes, files, sockets, clocks."""
