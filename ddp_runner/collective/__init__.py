"""JOINS: one process group per generation, its abort, the DDP replica, state between ranks.

abort      frees a rank from a collective, from any thread     group     forms and leaves a generation
store      this rank's connection to the store
replica    wraps a model in DDP with our hook and signals      transfer  moves state from rank to rank
device     proves a device after an abort              waiting   how a rank that waits stands on the board
communicators  when those that end in silence are aborted     wait_clock  how long a rank waits for the others
device_progress  to which sum a device has come, on the board
"""
