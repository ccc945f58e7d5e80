"""TRAINS: the step, the trainer and what belongs to them.

trainer     DDPTrainer: build, form, train, finish        task          what a user writes
step        one optimizer step and its commit             loading       finds the task of --task
guard       skipped steps, diverged replicas, roll-back     tuning        sizes and flags that fit
state       model, optimizer, counters as one value       runtime       what surrounds a trainer
evaluation  validation loss over all ranks                failure       exception -> Fault
audit       who gave which samples to a step                report        how training ended
saving      when a rank saves, beside training            progress      what else a rank knows
hashing     what replicas are compared by, beside it      fingerprint   the hash of a tensor
disk_faults what the disk refused or damaged, told      last_save  the save that no later one makes up for
schedule, ema, buffers, precision, optimizer, loss_monitor, rng    rules and small parts of the step
"""
