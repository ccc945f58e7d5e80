"""A rank's way through generations and steps: the engine, the commit of a step, and the ports of who makes steps."""
