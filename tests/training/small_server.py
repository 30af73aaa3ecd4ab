"""Stand-ins for vLLM's server: one whose answers are written down, and one that generates for real, by transformers
with the weights that it was handed."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.adapters.http_servers import Handler

END = 258
Reply = tuple[int, Any]
"""The status of an answer, and its JSON."""

_LOADING = threading.Lock()
"""transformers replaces methods of its classes while it loads a model: two loads at a time leave them replaced."""

_GENERATING = threading.Lock()
"""torch's generator, which is seeded for each completion, is one for all servers of a process."""


def load(folder: str, **options: Any) -> Any:
    """A model, loaded while no other thread loads one."""
    with _LOADING:
        return AutoModelForCausalLM.from_pretrained(folder, **options)


class Endpoint(Handler):
    """Hands requests to a Fake, each on a connection of its own."""

    protocol_version = "HTTP/1.0"

    def do_POST(self) -> None:
        """As the Fake answers; None: the connection ends without an answer."""
        answer = self.owner.answer(self.path, self.body() or {})
        if answer is None:
            self.close_connection = True
        else:
            self.answer(answer[1], answer[0], {"Content-Type": "application/json"})

    do_GET = do_POST


class Fake:
    """What vLLM's server does as far as anybody here asks; answers a prompt with its sum and the end."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.troubles: list[Callable[[Fake], Reply | None]] = []
        """What the next completions meet with; None: the connection ends without an answer."""
        self.missing: set[str] = set()
        self.details: dict[str, Any] | None = None
        """What it tells of itself in its development mode."""
        self.surely = True
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Anew: adapters and pushed weights are forgotten."""
        self.adapters: dict[str, str] = {}
        self.version = "default"
        handler = type("OfThisServer", (Endpoint,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        self.is_up = True  # last, as a test may stop it at once

    def stop(self) -> None:
        self.is_up = False
        self._http.shutdown()
        self._http.server_close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def dies(self) -> None:
        """And comes back."""
        self.stop()
        threading.Timer(0.2, self.start).start()

    @property
    def transport(self) -> httpx.MockTransport:
        """The server without a network."""
        return httpx.MockTransport(self.respond)

    async def respond(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        if not self.is_up:
            raise httpx.ConnectError("refused")
        answer = self.answer(request.url.path, json.loads(request.content or b"{}"))
        if answer is None:
            raise httpx.RemoteProtocolError("no response")
        return httpx.Response(answer[0], json=answer[1])

    def answer(self, path: str, body: dict[str, Any]) -> Reply | None:
        path = path.partition("?")[0]
        self.asked.append((path, body))
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        return getattr(self, "_" + path.removeprefix("/v1").strip("/").replace("/", "_"))(body)

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def _health(self, _: Any) -> Reply:
        return 200, {}

    def _models(self, _: Any) -> Reply:
        base = {"id": "base", "root": "some/model", "parent": None, "max_model_len": 100}
        adapters = [{"id": name, "root": root, "parent": "base"} for name, root in self.adapters.items()]
        return 200, {"data": [base, *adapters]}

    def _server_info(self, _: Any) -> Reply:
        return (404, {"detail": "Not Found"}) if self.details is None else (200, {"vllm_config": self.details})

    def _weight_info(self, _: Any) -> Reply:
        return 200, {"weight_version": self.version}

    def _update_weight_version(self, body: Any) -> Reply:
        self.version = body["new_version"]
        return 200, {}

    def _collective_rpc(self, body: Any) -> Reply:
        assert body["method"] == "reload_weights"
        assert (Path(body["kwargs"]["weights_path"]) / "model.safetensors").is_file()
        return 200, {"results": [None]}

    def _load_lora_adapter(self, body: Any) -> Reply:
        if not (Path(body["lora_path"]) / "adapter_model.safetensors").is_file():
            return 404, {"error": {"message": f"No adapter found for {body['lora_path']}"}}
        if body["lora_name"] in self.adapters:
            return 400, {"error": {"message": "has already been loaded"}}
        self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, {}

    def _unload_lora_adapter(self, body: Any) -> Reply:
        del self.adapters[body["lora_name"]]
        return 200, {}

    def _completions(self, body: Any) -> Reply | None:
        if self.troubles:
            return self.troubles.pop(0)(self)
        if body["model"] not in ("base", *self.adapters):
            return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
        choices = [{"index": index, **self.complete(ids, body)} for index, ids in enumerate(body["prompt"])]
        return 200, {"choices": choices[::-1]}

    def complete(self, prompt: list[int], body: Any) -> dict[str, Any]:
        """The completion of a prompt."""
        logprobs = {"token_logprobs": [0.0 if self.surely else -0.3, -0.5]}
        return {"prompt_token_ids": prompt, "token_ids": [sum(prompt), END], "logprobs": logprobs}


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

    def _models(self, body: Any) -> Reply:
        status, answer = super()._models(body)
        answer["data"][0] |= {"root": self.model, "max_model_len": 512}
        return status, answer

    def _collective_rpc(self, body: Any) -> Reply:
        answer = super()._collective_rpc(body)
        if not self.ignores:
            self.policy = load(body["kwargs"]["weights_path"]).eval()
        return answer

    def _load_lora_adapter(self, body: Any) -> Reply:
        with _GENERATING:  # no completion between the adapter's name and its weights
            answer = super()._load_lora_adapter(body)
            if answer[0] == 200 and not self.ignores:
                base = load(self.model, dtype=torch.float32)
                self.policy = PeftModel.from_pretrained(base, body["lora_path"]).eval()
        return answer

    def complete(self, prompt: list[int], body: Any) -> dict[str, Any]:
        """Sampled with the seed of the request."""
        with _GENERATING, torch.no_grad():
            return self._sample(prompt, body)

    def _sample(self, prompt: list[int], body: Any) -> dict[str, Any]:
        heat = body["temperature"]
        policy = self.base if body["model"] == "base" and self.adapters else self.policy
        if body.get("seed") is not None:
            torch.manual_seed(body["seed"] % 2**63)
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
        return {
            "prompt_token_ids": prompt,
            "token_ids": answer.tolist(),
            "logprobs": {"token_logprobs": said},
        }
