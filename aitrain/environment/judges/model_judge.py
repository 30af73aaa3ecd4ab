"""A model at an OpenAI-compatible address that judges answers: asked in JSON, with a cache and a budget."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aitrain.environment.judges.judge_http import JudgeServer
from aitrain.environment.judges.verdict_store import Budget, VerdictStore
from aitrain.errors import ConfigError
from aitrain.execution.failure import CallFailed, Failure

CACHE = "judge_cache.sqlite"
"""Name of the file in the working directory, unless `cache` names another one."""
THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """What a judge is asked, and how its reply is read."""

    rule: str
    """System message: what to judge by, and the form of the reply."""
    data: str
    """User message: the quoted texts."""
    schema: Mapping[str, Any]
    """JSON schema of the reply."""
    read: Callable[[Mapping[str, Any]], list[float]]
    """The verdict of a reply; raises ValueError if it is none."""


@dataclass(frozen=True, kw_only=True)
class ModelJudge(JudgeServer):
    """A model that judges. It has no state of its own, so calls of several threads and processes can share it."""

    model: str
    max_reply_tokens: int = 512
    """Tokens of one reply."""
    structured: bool = True
    """Whether the server is given the JSON schema of the reply; some servers refuse it."""
    cache: str | bool = True
    """File of the verdicts and of what was spent; False: equal questions are asked again."""
    max_calls: int | None = None
    """Calls that may be spent through the file of `cache`, in all runs together."""
    max_tokens: int | None = None
    """Tokens of prompts and replies that may be spent likewise."""

    def check(self) -> None:
        """Check address and numbers.

        Raises:
            ConfigError: one is wrong.
        """
        super().check()
        for name in ("max_reply_tokens", "max_calls", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(f"judges: {name} must be at least 1, not {value}")

    @property
    def store(self) -> VerdictStore:
        """The file of the verdicts and of what was spent."""
        return VerdictStore(Path(self.cache if isinstance(self.cache, str) else CACHE).expanduser().absolute())

    async def ask(self, question: Question) -> list[float]:
        """The verdict of the model; the same question gets the same verdict, also in other processes and runs.

        Raises:
            CallFailed: the server fails, its reply is no verdict, or the budget is used up.
        """
        messages = [{"role": "system", "content": question.rule}, {"role": "user", "content": question.data}]
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0}
        body["max_tokens"] = self.max_reply_tokens
        if self.structured:
            schema = {"name": "verdict", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.cache is False:
            return await self._asked(body, question)
        key = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        async with _lock_of(key):  # equal answers of a group are judged once
            found = self.store.find(key)
            return self.store.keep(key, await self._asked(body, question)) if found is None else found

    async def _asked(self, body: Mapping[str, Any], question: Question) -> list[float]:
        has_budget = self.max_calls is not None or self.max_tokens is not None
        judge = f"{self.model} at {self.url}"
        if has_budget:
            self.store.reserve(judge, Budget(self.max_calls, self.max_tokens))
        answer = await self.post("/chat/completions", body)
        try:
            said = answer["choices"][0]["message"]["content"] or ""
            tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
        except (LookupError, TypeError, ValueError, AttributeError):
            problem = f"the judge at {self.url} gave no chat completion: {str(answer)[:200]}"
            raise CallFailed(Failure("server", problem)) from None
        if has_budget:
            self.store.add_tokens(judge, tokens)
        try:
            return question.read(json_object(str(said)))
        except ValueError as error:
            raise CallFailed(Failure("server", f"the reply of the judge {self.model} is no verdict: {error}")) from None


def json_object(said: str) -> Mapping[str, Any]:
    """The JSON object that a reply consists of, a block of thoughts before it and a code fence around it aside.

    Raises:
        ValueError: the reply is anything else, or says more.
    """
    text = THOUGHTS.sub("", said, count=1).strip()
    fenced = FENCE.match(text)
    try:
        found = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"it must be one JSON object, not {said.strip()[:80]!r}")
    return found


def number_in(reply: Mapping[str, Any], name: str, low: int, high: int) -> float:
    """The number under a name, as a share of the range from `low` to `high`.

    Raises:
        ValueError: there is none, or it is not in the range.
    """
    value = reply.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, not {str(value)[:40]}")
    return (value - low) / (high - low)


def _lock_of(key: str) -> asyncio.Lock:
    """The lock of a question, for the tasks of one event loop."""
    return _locks.setdefault((id(asyncio.get_running_loop()), key), asyncio.Lock())


_locks: weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock] = weakref.WeakValueDictionary()
