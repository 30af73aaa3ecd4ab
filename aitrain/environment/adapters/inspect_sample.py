"""Runs one sample of an Inspect task with the policy as its model.

Inspect has no public way to run a sample within another program. What is used of its private API is imported here and
in `inspect.py`, and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inspect_ai import Task
from inspect_ai._eval.context import init_task_context
from inspect_ai._eval.task.generate import task_generate
from inspect_ai._eval.task.run import resolve_plan
from inspect_ai._eval.task.util import sample_messages
from inspect_ai.dataset import Sample
from inspect_ai.log._samples import active_sample
from inspect_ai.log._transcript import Transcript, init_transcript
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelName,
    ModelOutput,
    get_model,
    modelapi,
)
from inspect_ai.model._call_tools import parse_tool_call
from inspect_ai.model._model import init_sample_model_data
from inspect_ai.scorer import Target
from inspect_ai.scorer._score import init_scoring_context
from inspect_ai.scorer._scorer import unique_scorer_name
from inspect_ai.solver import TaskState
from inspect_ai.solver._task_state import sample_state, set_sample_state
from inspect_ai.tool import ToolInfo
from inspect_ai.util import LimitExceededError, message_limit, turn_limit
from inspect_ai.util._store import init_subtask_store

from aitrain.environment.adapters.settings import JsonMapping, JsonObject
from aitrain.environment.endpoint import Endpoint
from aitrain.errors import EpisodeTruncated

UNLIMITED = GenerateConfig(max_connections=1_000_000)
"""Without a limit on concurrent requests, which is Inspect's default: the policy answers when all episodes ask."""


@modelapi(name="aitrain")
class PolicyModel(ModelAPI):  # type: ignore[misc]
    """The policy as a model of Inspect, also of roles that nothing fills. Requests that go on with the first
    conversation are trained until the scorers ask; any other is answered by the policy outside of the trajectory."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__("policy", None, None, [], GenerateConfig())
        self.endpoint, self.trained, self.others = endpoint, True, 0
        self.first: JsonObject | None = None

    async def generate(
        self, input: Sequence[ChatMessage], tools: Sequence[ToolInfo], tool_choice: object, config: GenerateConfig
    ) -> ModelOutput:
        """The policy's answer."""
        messages = [_as_openai(message) for message in input]
        self.first = self.first or messages[0]
        is_trained = self.trained and messages[0] == self.first
        self.others += not is_trained
        fields = {"name", "description", "parameters"}
        schemas = [tool.model_dump(include=fields, exclude_none=True) for tool in tools]
        answer = await self.endpoint.chat(messages, tools=schemas, trained=is_trained)
        functions = [(call["id"], call["function"]) for call in answer.get("tool_calls") or ()]
        calls = [parse_tool_call(id, function["name"], function["arguments"]) for id, function in functions]
        message = ChatMessageAssistant(
            content=answer["content"] or "", tool_calls=calls or None, model="policy", source="generate"
        )
        return ModelOutput.from_message(message, "tool_calls" if calls else "stop")


def _as_openai(message: ChatMessage) -> JsonObject:
    if message.role == "tool":
        text = message.error.message if message.error else message.text
        return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id, "name": message.function}
    plain = {"role": message.role, "content": message.text}
    for one in message.tool_calls or () if message.role == "assistant" else ():
        function = {"name": one.function, "arguments": json.dumps(one.arguments)}
        plain.setdefault("tool_calls", []).append({"id": one.id, "type": "function", "function": function})
    return plain


NO_LIMITS = dict.fromkeys(("token_limit", "cost_limit", "time_limit", "working_limit"))


async def run_sample(
    task: Task, sample: Sample, endpoint: Endpoint, system: str | None, roles: JsonMapping
) -> tuple[dict[str, object], int]:
    """The values of all scores by their scorers, and how many requests were not trained."""
    policy = PolicyModel(endpoint)
    model = Model(policy, UNLIMITED)
    by_role = {name: get_model(value) for name, value in {**(task.model_roles or {}), **roles}.items()}
    init_task_context(model, by_role, task.config.merge(UNLIMITED))
    init_sample_model_data()

    messages = sample_messages(sample)
    if system is not None:
        messages = [ChatMessageSystem(content=system), *(one for one in messages if one.role != "system")]
    target = Target(sample.target)
    state = TaskState(
        model=ModelName(model), sample_id=sample.id, epoch=1, input=sample.input, messages=messages, target=target,
        choices=sample.choices, metadata=sample.metadata or {},
    )  # fmt: skip
    transcript = Transcript()
    init_transcript(transcript)
    init_subtask_store(state.store)
    set_sample_state(state)
    init_scoring_context(task.scorer or [], target)

    async def generate(state: TaskState, tool_calls: Any = "loop", cache: Any = False, **options: Any) -> TaskState:
        return await task_generate(model, state, tool_calls, cache, GenerateConfig(**options))

    names = {"task": task.name, "log_location": "", "model": "policy", "eval_id": "aitrain", "sample_uuid": state.uuid}
    limits = {**NO_LIMITS, "message_limit": task.message_limit}
    async with active_sample(sample=sample, epoch=1, fails_on_error=True, transcript=transcript, **names, **limits):
        try:
            with message_limit(task.message_limit), turn_limit(task.turn_limit):
                state = await resolve_plan(task, None)(state, generate)
        except (LimitExceededError, EpisodeTruncated):
            state = sample_state() or state  # scored as it stands, as Inspect does at its limits
        state.completed, policy.trained = True, False
        scores = dict(state.scores or {})
        for scorer in task.scorer or []:
            score = await scorer(state, target)
            if score is not None:
                scores[unique_scorer_name(scorer, list(scores))] = score
        if task.cleanup:
            await task.cleanup(state)
    return {name: score.value for name, score in scores.items()}, policy.others
