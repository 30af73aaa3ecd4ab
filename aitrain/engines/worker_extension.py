"""What vLLM's workers on the CPU need to load weights.

vLLM's own processes import this module, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Methods that vLLM's workers get (`--worker-extension-cls`), callable over /collective_rpc."""

    model_runner: Any

    def renew_tied_head(self) -> None:
        """See `renew_tied_head`."""
        renew_tied_head(self.model_runner.get_model())


def renew_tied_head(model: Any) -> None:
    """Repack the output layer of a model with tied embeddings after a reload of weights.

    On the CPU, vLLM 0.31 keeps a repacked copy of the output layer, which a reload of the embedding does not update.
    """
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    model.lm_head.weight = model.model.embed_tokens.weight
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
