"""Launching a run: the checks before it, its processes, and `aitrain doctor`."""
