"""Options of a run: sections, the jobs composed of them, and what is derived from both (flags, YAML, docs, schema)."""
