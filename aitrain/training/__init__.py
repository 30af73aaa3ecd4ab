"""The heavy wing: the only rooms that import torch, transformers, peft, datasets, trl, accelerate or vllm."""
