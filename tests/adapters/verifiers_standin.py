"""A stand-in for verifiers 0.3: its functions that the adapter uses, with a rubric that turns exceptions into 0."""

FILES = {
    "verifiers/__init__.py": """
import importlib, signal
from verifiers.types import UserMessage

class Error(Exception): pass
class OverlongPromptError(Error): pass

class Rows(list):
    column_names = ["prompt", "answer"]

class Rubric:
    def __init__(self, funcs=(), weights=()):
        self.funcs, self.weights, self.has_group_rewards = list(funcs), list(weights), False
        self.cleaned = []

    def score_objects(self, state):
        return {name: state[name] for name in ("prompt", "completion", "answer")}

    async def score_rollout(self, state):
        metrics = {}
        for function in self.funcs:
            metrics[function.__name__] = await self._call_individual_reward_func(func=function, state=state)
        state["reward"] = sum(metrics[f.__name__] * w for f, w in zip(self.funcs, self.weights))
        state["metrics"] = metrics

    async def cleanup(self, state):
        self.cleaned.append(state)

class Env:
    eval_dataset_source = None

    def __init__(self, dataset, rubric, max_turns=1, eval_dataset=None):
        self.dataset, self.rubric, self.max_turns, self.eval_dataset = dataset, rubric, max_turns, eval_dataset
        self.torn_down = 0
        signal.signal(signal.SIGTERM, lambda *_: None)

    def get_dataset(self):
        return Rows(self.dataset)

    def get_eval_dataset(self):
        return Rows(self.eval_dataset)

    async def rollout(self, input, client, model, sampling_args):
        state = {"prompt": [UserMessage(**message) for message in input["prompt"]], "answer": input["answer"],
                 "error": None}
        said = []
        try:
            while len(said) < 2 * self.max_turns:
                answer = await client.get_response(state["prompt"] + said, model)
                said.append(answer)
                if answer.content == "raise":
                    state["error"] = Error("the tool's server is gone")
                    break
                said.append(UserMessage(role="user", content="again"))
        except OverlongPromptError:
            state["is_truncated"] = True
        state["completion"] = said[:-1] if said and said[-1].role == "user" else said
        return state

    async def _teardown(self):
        self.torn_down += 1

def load_environment(id, **arguments):
    return importlib.import_module(id.replace("-", "_")).load_environment(**arguments)
""",
    "verifiers/types.py": """
from dataclasses import dataclass
from pydantic import BaseModel

class Free(BaseModel, extra="allow"):
    def __getitem__(self, key):
        return getattr(self, key)

class UserMessage(Free):
    role: str
    content: str

class AssistantMessage(Free):
    role: str = "assistant"
    content: str | None = None

@dataclass
class ClientConfig:
    api_base_url: str
    api_key_var: str
    max_retries: int
""",
    "verifiers/clients.py": """
import os
import httpx
from verifiers import Error, OverlongPromptError
from verifiers.types import AssistantMessage

class Client:
    def __init__(self, config):
        headers = {"Authorization": f"Bearer {os.environ[config.api_key_var]}"}
        self.http = httpx.AsyncClient(base_url=config.api_base_url, headers=headers, timeout=None)

    async def get_response(self, messages, model):
        body = {"model": model, "messages": [message.model_dump() for message in messages]}
        response = await self.http.post("/chat/completions", json=body)
        if "context length" in response.text:
            raise OverlongPromptError
        if response.is_error:
            raise Error(response.text)
        return AssistantMessage(content=response.json()["choices"][0]["message"]["content"])

    async def close(self):
        await self.http.aclose()

resolve_client = Client
""",
    "my_env.py": """
import verifiers as vf

async def exact(completion, answer):
    last = completion[-1]
    return float(last["content"] == answer)

def short(completion):
    return 1 - len(completion[-1].content) / 10

def parts(completion):
    return {"a": 1.0, "b": 2.0}

def broken(completion):
    raise ValueError("no dictionary")

def rows(count):
    return [{"prompt": [{"role": "system", "content": "Add.", "name": None},
                        {"role": "user", "content": f"{n}+{n}"}], "answer": str(2 * n)} for n in range(count)]

def load_environment(count=6, broken_weight=0.0, held_out=2, **options):
    rubric = vf.Rubric([exact, short, parts, broken], [1.0, 0.5, 0.0, broken_weight])
    return vf.Env(rows(count), rubric, eval_dataset=rows(held_out) or None, **options)
""",
}
