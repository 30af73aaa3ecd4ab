"""Starting a run: what can be checked first, and its processes."""
