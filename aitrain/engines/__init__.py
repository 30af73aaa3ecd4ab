"""Engines, which turn token ids into sampled token ids: transformers, colocated vLLM, a vLLM server."""
