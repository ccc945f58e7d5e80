"""FEEDS: which samples a step takes, the workers that load them, and their repair. Never trains.

order     seed and step -> the sample indices of that step; shares of ranks; micro-batches
permutation  the order of an epoch: a keyed permutation, and the table of older runs
source    one index batch -> loaded samples, seeded per sample; a failing sample becomes a value
workers   how many of them a rank has
worker    what a loader worker does first: die with its rank, ignore the run's signals
transport from a worker to its rank: tensors in memory files, descriptors sent ahead
files     those files: no name, no room in /dev/shm
waiting   how long a batch is waited for; workers that are stopped
stamps    what each worker is loading right now, readable after its death
pool      running workers: receive with a deadline, notice a death at once, report it, end them
loader    SafeDataLoader: position, seeking, life of the workers
stream    StreamLoader: the same for an iterable dataset, in the rank itself
plain     a dataset's own state as values that can be stored and sent
delivered what the last step was given, for when it is done again
mending   what is done about a fault of loading; report: what people are told of it
isolate   finds the samples that break loading; quarantine: what stands in for them
sample_hash  a hash of what a sample holds, to compare the data of ranks and launches
injected  bad samples on request
limits    open files and /dev/shm, checked before they run out
corpus    text files on disk -> lists of files, splits, fingerprint (without torch)
windows   ByteWindows: memory-mapped windows of bytes over those files
"""
