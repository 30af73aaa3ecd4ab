"""Environments of the verifiers library: `--rl-env verifiers:my-env`.

Settings: those of `settings.py`; the arguments are passed to `load_environment` (verifiers 0.4: are fields of the
taskset's configuration).

verifiers 0.3 and 0.4 have different APIs: LegacyVerifiers is for 0.3, VerifiersV1 for 0.4.
"""

import asyncio
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from itertools import islice
from typing import Any  # also for the objects of verifiers, which have no types here

from aitrain.environment.adapters.settings import PackageEnvironment, prompted
from aitrain.environment.contract import Score, arguments_for, as_messages
from aitrain.environment.endpoint import Endpoint
from aitrain.environment.session import Message
from aitrain.environment.user_modules import package_files
from aitrain.errors import ConfigError
from aitrain.execution.process_tree import on_stop_signals
from aitrain.packages import version_of

KEY = "AITRAIN_ENDPOINT_KEY"  # variable from which verifiers' clients read the key of the address


class VerifiersEnvironment(PackageEnvironment):
    """What the adapters of both versions share. verifiers does not bound the value of a reward function, so there must
    be a score_range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # the id may name an owner, a version or an environment around a taskset
        name = self.id.rpartition("+")[2].rsplit("/", 1)[-1].partition("@")[0]
        with suppress(ConfigError):  # one that verifiers has itself
            self.source_files = package_files(name.replace("-", "_"))


async def reward_of(rubric: Any, func: Any, state: Any) -> float:
    """The reward that a function of a rubric gives, in place of the rubric's own method: that one makes 0 of whatever
    the function raises. One without a weight may raise, and is left out of the metrics, see `not_measured`."""
    try:
        value = func(**arguments_for(func, rubric.score_objects(state)))
        return float(await value if inspect.isawaitable(value) else value)
    except Exception:
        weights = [weight for one, weight in zip(rubric.funcs, rubric.weights, strict=True) if one is func]
        if any(weights) or not weights:
            raise
        state.setdefault("not_measured", []).append(func.__name__)
        return 0.0


class LegacyVerifiers(VerifiersEnvironment):
    """One environment of verifiers 0.3, of any kind, with its rubric."""

    def __post_init__(self) -> None:
        import verifiers

        super().__post_init__()
        with on_stop_signals(signal.default_int_handler):  # it replaces them, and ours are put back
            self.env = verifiers.load_environment(self.id, **self.arguments)
        if self.env.rubric.has_group_rewards:
            raise ConfigError("rl_env: a reward function of this environment compares rollouts, which is not supported")
        turns = getattr(self.env, "max_turns", None) or 0
        self.requirements = replace(self.requirements, max_turns=turns if turns > 0 else None)
        verifiers.Rubric._call_individual_reward_func = reward_of  # of all rubrics, also of those in others

    def build_dataset(self) -> list[Message]:
        """One row for each row of the environment's dataset, which holds all that a rollout needs."""
        return self._rows(self.env.get_dataset())

    @property
    def build_eval_dataset(self) -> Callable[[], list[Message]] | None:
        """The environment's own held-out rows; None if it has none."""
        has_own = self.env.eval_dataset is not None or self.env.eval_dataset_source is not None
        return (lambda: self._rows(self.env.get_eval_dataset())) if has_own else None

    def _rows(self, dataset: Any) -> list[Message]:
        rows = []
        for row in (dict(dataset[number]) for number in self.choose(range(len(dataset)))):
            said = as_messages(row.pop("prompt"))
            asked = [{key: value for key, value in message.items() if value is not None} for message in said]
            rows.append({"prompt": prompted(asked, self.system), "answer": row.get("answer"), "vf_input": row})
        return rows

    async def rollout(self, prompt: list[Message], vf_input: Message, endpoint: Endpoint) -> Score:
        """The environment's rollout; then the score of its rubric, each function of which is a metric."""
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        os.environ[KEY] = endpoint.api_key  # that of all episodes of this process
        client = resolve_client(ClientConfig(api_base_url=endpoint.base_url, api_key_var=KEY, max_retries=0))
        try:
            state = await self.env.rollout({**vf_input, "prompt": prompt}, client, endpoint.model, {})
        finally:
            await client.close()
        if state.get("error") is not None:
            raise state["error"]
        try:
            await self.env.rubric.score_rollout(state)
        finally:
            await self.env.rubric.cleanup(state)
        unknown = state.get("not_measured", ())
        return Score(state["reward"], {name: value for name, value in state["metrics"].items() if name not in unknown})

    async def close(self) -> None:
        """Release what the environment holds; verifiers would do it when the process ends."""
        await self.env._teardown()
        self.env._teardown = functools.partial(asyncio.sleep, 0)


HARNESS = "aitrain_verifiers_harness"  # verifiers imports the chat loop by this name


class VerifiersV1(VerifiersEnvironment):
    """One taskset of verifiers 0.4, with its own environment or a named one (`best-of-n+my-taskset`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.env = self.load()
        is_endless = self.env.taskset.INFINITE
        if self.size is None and is_endless:
            raise ConfigError("rl_env_config: this taskset has no end: set size, the number of cases")
        is_cut = is_endless or self.seed is None  # a seed chooses among all tasks
        self.tasks = list(islice(self.env.taskset, self.size if is_cut else None))
        self._starting = asyncio.Lock()
        self._serving: AsyncExitStack | None = None

    def load(self) -> Any:
        """The environment of the taskset, whose agents run the chat loop in this process."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import env_config_type, load_environment

        from aitrain.environment.adapters import verifiers_harness

        sys.modules[HARNESS] = verifiers_harness
        # the tool servers of a taskset are programs that import its module
        paths = filter(None, (os.environ.get("PYTHONPATH"), os.getcwd()))
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        env, _, taskset = self.id.rpartition("+")
        fields: Any = env_config_type(taskset, env)
        local = {"type": "subprocess"}
        agents = {name: {"harness": {"id": HARNESS}, "runtime": local} for name in agent_config_fields(fields())}
        return load_environment(
            fields.model_validate({"id": env, "taskset": {"id": taskset, **self.arguments}, **agents})
        )

    def build_dataset(self) -> list[Message]:
        """One row for each task, with the task's data in it."""
        from aitrain.environment.adapters.verifiers_harness import messages_of

        rows: list[Message] = []
        for task in self.choose(self.tasks):
            data = task.data if self.system is None else task.with_system_prompt(self.system).data
            answer = getattr(data, "answer", None)
            rows.append({"prompt": messages_of(data), "answer": answer, "vf_data": data.model_dump(mode="json")})
        return rows

    async def rollout(self, vf_data: Message, endpoint: Endpoint) -> Score:
        """The environment's episode and its reward; each reward and metric is a metric."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        async with self._starting:  # what all episodes of this process share, once
            if self._serving is None:
                stack = AsyncExitStack()
                await stack.enter_async_context(self.env.serving())
                self._serving = stack
        task = self.tasks[0].with_data()
        task.data = type(task.data).model_validate(vf_data)
        os.environ[KEY] = endpoint.api_key
        ctx = ModelContext(endpoint.model, EvalClientConfig(base_url=endpoint.base_url, api_key_var=KEY))
        episode = await self.env.run_episode(task, ctx)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors)[:1000])
        trace = episode.traces[0]
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return Score(trace.reward, {**trace.metrics, **rewards})

    async def close(self) -> None:
        """Stop what the episodes shared."""
        if self._serving is not None:
            await self._serving.aclose()


Verifiers = VerifiersV1 if str(version_of("verifiers")).startswith("0.4") else LegacyVerifiers
