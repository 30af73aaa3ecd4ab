"""A stand-in for vLLM's server that generates for all requests at once: `python -m benchmarks.small_server` prints its
address, and ends with its standard input."""

from __future__ import annotations

import queue
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file

from aitrain.training.model import TINY_MODEL
from tests.training.small_server import SmallServer
from tests.training.test_served import Fake

WINDOW = 0.02
"""Seconds to wait for further requests."""


class BatchingServer(SmallServer):
    """Generates one batch after the other; seeds are ignored."""

    def start(self) -> None:
        """With a thread that generates."""
        super().start()
        self.waiting: queue.SimpleQueue[tuple[Any, queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _load_lora_adapter(self, body: Any) -> tuple[int, Any]:
        """As fast as vLLM: the base is loaded once."""
        if not isinstance(self.policy, PeftModel):
            return super()._load_lora_adapter(body)
        set_peft_model_state_dict(self.policy, load_file(f"{body['lora_path']}/adapter_model.safetensors"))
        return Fake._load_lora_adapter(self, body)

    def _completions(self, body: Any) -> tuple[int, Any] | None:
        if len(body["prompt"]) > 1 or body.get("n", 1) > 1 or body["logprobs"] > 1:
            return super()._completions(body)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.waiting.put((body, answers))
        return 200, {"choices": [answers.get()]}

    def _serve(self) -> None:
        while True:
            calls = [self.waiting.get()]
            time.sleep(WINDOW)
            while not self.waiting.empty():
                calls.append(self.waiting.get())
            for (_, answers), choice in zip(calls, self._generate([body for body, _ in calls]), strict=True):
                answers.put(choice)

    @torch.no_grad()
    def _generate(self, bodies: list[Any]) -> list[dict[str, Any]]:
        prompts = [body["prompt"][0] for body in bodies]
        width, longest = max(map(len, prompts)), max(body["max_tokens"] for body in bodies)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        heats = torch.tensor([body["temperature"] for body in bodies])[:, None]
        ends = torch.tensor(self.policy.generation_config.eos_token_id).reshape(-1)
        ended, cache, given = torch.zeros(len(bodies), dtype=torch.bool), None, ids
        tokens, logprobs = [], []
        while len(tokens) < longest and not ended.all():
            places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
            output = self.policy(given, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
            cache, logits = output.past_key_values, output.logits[:, -1]
            logps = (logits / heats.clamp(min=1e-6)).log_softmax(-1)
            given = torch.where(heats > 0, logps.exp().multinomial(1), logits.argmax(-1, keepdim=True))
            tokens.append(given[:, 0])
            logprobs.append(logps.gather(-1, given)[:, 0])
            ended |= torch.isin(given[:, 0], ends)
            mask = torch.cat([mask, torch.ones_like(given)], -1)
        rows, values = torch.stack(tokens, -1).tolist(), torch.stack(logprobs, -1).tolist()
        return [_choice(*row, ends.tolist()) for row in zip(bodies, rows, values, strict=True)]


def _choice(body: Any, tokens: list[int], logprobs: list[float], ends: list[int]) -> dict[str, Any]:
    """One completion, up to its end."""
    stops = [place for place, token in enumerate(tokens) if token in ends]
    count = min([body["max_tokens"], *(place + 1 for place in stops[:1])])
    return {
        "index": 0,
        "prompt_token_ids": body["prompt"][0],
        "token_ids": tokens[:count],
        "logprobs": {"token_logprobs": logprobs[:count], "top_logprobs": []},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    ThreadingHTTPServer.request_queue_size = 256
    print(BatchingServer(TINY_MODEL).url, flush=True)
    sys.stdin.read()
