"""FEEDS: which samples a step takes, and the workers that load them. Never trains, never repairs.

order     seed and step -> the sample indices of that step; shares of ranks; micro-batches
source    one index batch -> loaded samples, seeded per sample; a failing sample becomes a value
worker    what a loader worker does first: die with its rank, ignore the run's signals
transport from a worker to its rank: tensors in shared memory, descriptors sent ahead
stamps    what each worker is loading right now, readable after its death
pool      running workers: receive with a deadline, notice a death at once, report it, end them
loader    SafeDataLoader: position, seeking, faults
limits    open files and /dev/shm, checked before they run out
corpus    text files on disk -> lists of files, splits, fingerprint (without torch)
windows   ByteWindows: memory-mapped windows of bytes over those files
"""
