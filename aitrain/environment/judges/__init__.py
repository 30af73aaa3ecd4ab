"""Judges: rules by name, model judges, remote ones and the user's own; `aitrain.judges` has the public names."""
