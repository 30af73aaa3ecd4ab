"""Jobs, each from top to bottom in the order in which things happen, and the worker that runs one."""
