"""Episodes: how they are played on any engine, without torch or TRL."""
