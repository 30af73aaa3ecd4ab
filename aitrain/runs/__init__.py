"""What a run leaves in its folder, as typed values: written and read by the same code."""
