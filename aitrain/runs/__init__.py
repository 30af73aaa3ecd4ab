"""The run folder: its files as typed values, written and read by the same code."""
