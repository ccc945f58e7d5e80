"""KEEPS: a checkpoint that was announced can always be read again. Never decides when to save.

manifest    what a checkpoint is, as a value, and its JSON form; file names    (no torch)
disk        the few disk operations that durability rests on                   (no torch)
publish     one file, written under a temporary name and published when synced (no torch)
catalog     which checkpoints a directory holds, and whether each is intact    (no torch)
snapshot    a state's copy in host memory, made while training reads on
background  one save at a time, in a thread beside training
store       CheckpointStore: save, retention, load
weights     torch files as plain data; weights for ``--init-from``
naming      the names of a model's entries: in files those of the bare model
codec       state dicts as values: differences, digest, what can be stored
"""
