"""TRAINS: the step, the trainer and what belongs to them.

components   what a training consists of beside the model: optimizer, schedule, average, generators
exactness    what a step changes, and whether a repeated one comes to the same

``trainer`` builds, forms and finishes; ``session`` trains within a generation; ``step`` is one step and
its commit; ``task`` is what a user writes.
"""
