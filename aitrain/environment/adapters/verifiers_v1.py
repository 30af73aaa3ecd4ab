"""Tasksets of verifiers 0.4: its environment runs an episode, whose model is the policy's address.

The agents run in a chat loop in this process (`verifiers_harness.py`), instead of the sandbox of verifiers' maker that
is its default.
"""

from __future__ import annotations

import asyncio
import copy
import os
import sys
import threading
from contextlib import AsyncExitStack
from itertools import islice

from aitrain.environment.adapters.verifiers_settings import Foreign, VerifiersSettings
from aitrain.environment.contract import Score
from aitrain.environment.endpoint import Endpoint
from aitrain.environment.requirements import EnvRequirements
from aitrain.environment.session import Message
from aitrain.errors import ConfigError

HARNESS = "aitrain_verifiers_harness"  # verifiers imports the chat loop by this name
LOCAL = {"type": "subprocess"}
KEY = "AITRAIN_ENDPOINT_KEY"  # variable from which its client reads the key of the address


class VerifiersV1:
    """One taskset of verifiers 0.4, with its own environment or a named one (`best-of-n+my-taskset`)."""

    def __init__(self, settings: VerifiersSettings) -> None:
        self.settings = settings
        self.env = _load(settings)
        count = None if settings.size is None else settings.size + settings.few_shot
        if count is None and self.env.taskset.INFINITE:
            raise ConfigError("rl_env_config: this taskset has no end: set size, the number of cases")
        self.tasks = list(islice(iter(self.env.taskset), count if settings.seed is None else None))
        self.template = self.tasks[0]
        rewards = self.template.hooks("reward")
        self.source_files = settings.source_files([*rewards, self.env, self.env.taskset])
        weights = [getattr(function, "_vf_weight", 1.0) for function in rewards]
        weights += [judge.config.weight for judge in self.template.plugged_judges()]
        self.requirements = EnvRequirements("process", score_range=settings.read_range(weights))
        self.lock, self._starting = threading.Lock(), asyncio.Lock()
        self._serving: AsyncExitStack | None = None

    def build_dataset(self) -> list[Message]:
        """One row for each task, with the task's data in it."""
        shots, asked = self.settings.choose_rows(len(self.tasks))
        known = (self.tasks[number].data for number in shots)
        solved, rows = [(one.prompt_text, getattr(one, "answer", None)) for one in known], []
        for task in (self.tasks[number] for number in asked):
            prompt = self.settings.prompt_with(_prompt(task.data), solved)
            rows.append({"prompt": prompt, "vf_data": self._with_prompt(task.data, prompt).model_dump(mode="json")})
        return rows

    def _with_prompt(self, data: Foreign, prompt: list[Message]) -> Foreign:
        """The task's data with the settings' system prompt and solved cases; unchanged without them."""
        changed: Message = {} if self.settings.system is None else {"system_prompt": self.settings.system}
        if self.settings.few_shot:
            changed["prompt"] = [message for message in prompt if message["role"] != "system"]
        return type(data).model_validate({**data.model_dump(), **changed}) if changed else data

    async def rollout(self, vf_data: Message, endpoint: Endpoint) -> Score:
        """The environment's episode and its reward; each reward and metric is a metric."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        await self._serve()
        task = copy.copy(self.template)
        task.data = type(task.data).model_validate(vf_data)
        with self.lock:
            os.environ[KEY] = endpoint.api_key
        ctx = ModelContext(endpoint.model, EvalClientConfig(base_url=endpoint.base_url, api_key_var=KEY))
        episode = await self.env.run_episode(task, ctx)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors)[:1000])
        trace = episode.traces[0]
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return Score(trace.reward, {**trace.metrics, **rewards})

    async def _serve(self) -> None:
        """Start what all episodes of this process share, once."""
        async with self._starting:
            if self._serving is None:
                stack = AsyncExitStack()
                await stack.enter_async_context(self.env.serving())
                self._serving = stack

    async def close(self) -> None:
        """Stop what the episodes shared."""
        if self._serving is not None:
            await self._serving.aclose()


def _load(settings: VerifiersSettings) -> Foreign:
    from pydantic import ValidationError
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.env import Env
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class, load_environment

    from aitrain.environment.adapters import verifiers_harness

    sys.modules[HARNESS] = verifiers_harness
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if os.getcwd() not in paths:  # the tool servers of a taskset are programs that import its module
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), os.getcwd()])
    env, _, taskset = settings.id.rpartition("+")
    fields: Foreign = concrete_type(environment_class(taskset, env), EnvConfig, origin=Env) or EnvConfig
    agents = {name: {"harness": {"id": HARNESS}, "runtime": LOCAL} for name in agent_config_fields(fields())}
    try:
        config = fields.model_validate({"id": env, "taskset": {"id": taskset, **settings.arguments}, **agents})
    except ValidationError as error:
        raise ConfigError(f"rl_env_config: {' '.join(str(error).split())[:300]}") from error
    return load_environment(config)


def _prompt(data: Foreign) -> list[Message]:
    from verifiers.v1.dialects.chat import message_to_wire

    own = data.prompt or []
    asked = [{"role": "user", "content": own}] if isinstance(own, str) else [message_to_wire(one) for one in own]
    return [{"role": "system", "content": data.system_prompt}, *asked] if data.system_prompt else asked
