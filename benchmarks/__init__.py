"""One file a claim: each measures aitrain against a peer in the same run, and says how much the measure wavers."""
