"""The rules of faults and repairs. Pure: no torch, clock, file, process or thread."""
