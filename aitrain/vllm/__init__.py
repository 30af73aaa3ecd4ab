"""vLLM's server: its process, its supervisor, its client."""
