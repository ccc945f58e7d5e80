"""PARTS: what a training consists of beside the model, each for itself. None trains."""
