"""vLLM's server: its process, its client."""
