"""What a training measures: validation, metrics, phases of a step, profiles and its report."""
