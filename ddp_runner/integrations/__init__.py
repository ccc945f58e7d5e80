"""Trainers of other libraries whose steps are repaired in place. Each module imports its library, and our public names alone."""
