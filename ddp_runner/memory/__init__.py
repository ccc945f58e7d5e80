"""WATCHES: how much memory a rank and its loader workers use, and what is done about it.

limits    the container's memory limit, its use, and how often the kernel killed for memory
kernel_kills  whether a process was just killed for memory
readings  one look at everything that is measured: rank, loader workers, machine, device
uses      which limit a reading is closest to
reclaim   giving memory back: garbage, device cache, C heap
manager   MemoryManager: reads at intervals, reacts to pressure, enforces max_memory_gb

The rules (levels, hysteresis, what is a leak) are in ``core.pressure`` and ``core.leak``.
"""
