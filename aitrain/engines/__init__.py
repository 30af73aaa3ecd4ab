"""What turns token ids into sampled token ids: transformers, vLLM in this process, a vLLM server."""
