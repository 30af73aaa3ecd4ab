"""Jobs, each from top to bottom in the order in which things happen, and the training process that runs one."""
