"""A stand-in for vLLM's server that generates for real: transformers with the weights that it was handed."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.training.test_served import Fake

_LOADING = threading.Lock()
"""transformers replaces methods of its classes while it loads a model: two loads at a time leave them replaced."""

_GENERATING = threading.Lock()
"""torch's generator, which is seeded for each completion, is one for all servers of a process."""


def load(folder: str, **options: Any) -> Any:
    """A model, loaded while no other thread loads one."""
    with _LOADING:
        return AutoModelForCausalLM.from_pretrained(folder, **options)


class SmallServer(Fake):
    """Serves a small model, and says the log-probabilities that it has; weights that it `ignores` change nothing."""

    def __init__(self, model: Path, ignores: bool = False) -> None:
        self.model, self.ignores = str(model), ignores
        super().__init__()

    def start(self) -> None:
        """With the base's weights."""
        self.policy: Any = load(self.model, dtype=torch.float32).eval()
        self.base = copy.deepcopy(self.policy)
        super().start()

    def _models(self, body: Any) -> tuple[int, Any]:
        status, answer = super()._models(body)
        answer["data"][0] |= {"root": self.model, "max_model_len": 512}
        return status, answer

    def _collective_rpc(self, body: Any) -> tuple[int, Any]:
        answer = super()._collective_rpc(body)
        if not self.ignores:
            self.policy = load(body["kwargs"]["weights_path"]).eval()
        return answer

    def _load_lora_adapter(self, body: Any) -> tuple[int, Any]:
        with _GENERATING:  # no completion between the adapter's name and its weights
            answer = super()._load_lora_adapter(body)
            if answer[0] == 200 and not self.ignores:
                base = load(self.model, dtype=torch.float32)
                self.policy = PeftModel.from_pretrained(base, body["lora_path"]).eval()
        return answer

    def _completions(self, body: Any) -> tuple[int, Any] | None:
        if self.troubles:
            return self.troubles.pop(0)(self)
        if body["model"] not in ("base", *self.adapters):
            return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
        with _GENERATING, torch.no_grad():
            places = [(ids, number) for ids in body["prompt"] for number in range(body.get("n", 1))]
            choices = [self._choice(index, *place, body) for index, place in enumerate(places)]
        return 200, {"choices": choices}

    def _choice(self, index: int, prompt: list[int], number: int, body: Any) -> dict[str, Any]:
        heat = body["temperature"]
        policy = self.base if body["model"] == "base" and self.adapters else self.policy
        if body.get("seed") is not None:
            torch.manual_seed((body["seed"] + number) % 2**63)
        ids = policy.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=body["max_tokens"], do_sample=heat > 0,
            temperature=heat or None, top_k=body["top_k"] if heat else None, top_p=1.0 if heat else None,
        )[0]  # fmt: skip
        answer = ids[len(prompt) :]
        logits = policy(ids[None]).logits[0, :-1] / (heat or 1.0)
        if body["top_k"] > 0:
            logits = logits.masked_fill(logits < logits.topk(body["top_k"]).values[:, -1:], -torch.inf)
        logprobs = logits[len(prompt) - 1 :].log_softmax(-1)
        said = logprobs.gather(-1, answer[:, None])[:, 0].tolist()
        likeliest = [dict(zip(*map(torch.Tensor.tolist, (top.indices, top.values)), strict=True))
                     for top in (row.topk(max(1, body["logprobs"])) for row in logprobs)]  # fmt: skip
        return {
            "index": index,
            "prompt_token_ids": prompt,
            "token_ids": answer.tolist(),
            "logprobs": {
                "token_logprobs": said,
                "top_logprobs": [{f"token_id:{token}": value for token, value in top.items()} for top in likeliest],
            },
        }
