"""DECIDES: pure rules, values in, values out. No torch, clock, files, processes, threads, logging."""
