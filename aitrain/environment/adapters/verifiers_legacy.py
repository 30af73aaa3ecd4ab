"""Environments of verifiers 0.3: their own rollout runs, and its model client asks the policy."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from aitrain.environment.adapters.verifiers_messages import as_openai, endpoint_client
from aitrain.environment.adapters.verifiers_scoring import RubricOutcome, watch_rubric
from aitrain.environment.adapters.verifiers_settings import Foreign, VerifiersSettings
from aitrain.environment.contract import Score
from aitrain.environment.endpoint import Endpoint
from aitrain.environment.requirements import EnvRequirements
from aitrain.environment.session import Message
from aitrain.errors import ConfigError


class LegacyVerifiers:
    """One environment of verifiers 0.3, of any kind, with its rubric."""

    def __init__(self, settings: VerifiersSettings) -> None:
        self.settings = settings
        with _kept_signals():
            self.env = _load(settings)
        rubric = self.env.rubric
        if rubric.has_group_rewards:
            raise ConfigError("rl_env: a reward function of this environment compares rollouts, which is not supported")
        bounds = settings.read_range(rubric._get_reward_weights())
        turns = getattr(self.env, "max_turns", None) or 0
        self.requirements = EnvRequirements("process", max_turns=turns if turns > 0 else None, score_range=bounds)
        self.source_files = settings.source_files([*watch_rubric(rubric), self.env])

    def build_dataset(self) -> list[Message]:
        """One row for each row of the environment's dataset, which holds all that a rollout needs."""
        return self._rows(self.env.get_dataset())

    @property
    def build_eval_dataset(self) -> Callable[[], list[Message]] | None:
        """The environment's own held-out rows; None if it has none."""
        has_own = self.env.eval_dataset is not None or self.env.eval_dataset_source is not None
        return (lambda: self._rows(self.env.get_eval_dataset())) if has_own else None

    def _rows(self, dataset: Foreign) -> list[Message]:
        shots, asked = self.settings.choose_rows(len(dataset))
        solved = [(_prompt(row)[-1]["content"], row.get("answer")) for row in (dataset[number] for number in shots)]
        rows = []
        for row in (dict(dataset[number]) for number in asked):
            prompt = self.settings.prompt_with(_prompt(row), solved)
            rows.append({"prompt": prompt, "vf_input": {key: row[key] for key in row if key != "prompt"}})
        return rows

    async def rollout(self, prompt: list[Message], vf_input: Message, endpoint: Endpoint) -> Score:
        """The environment's rollout; then the score of its rubric, each function of which is a metric."""
        state = await self.env.rollout({**vf_input, "prompt": prompt}, endpoint_client(endpoint), endpoint.model, {})
        if state.get("error") is not None:
            raise state["error"]
        scoring = RubricOutcome.of_this_rollout()
        await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        if scoring.error is not None:
            raise scoring.error
        metrics = {name: value for name, value in state["metrics"].items() if name not in scoring.unknown}
        return Score(state["reward"], {**metrics, **scoring.metrics})

    async def close(self) -> None:
        """Release what the environment holds; verifiers would do it when the process ends."""
        await self.env._teardown()
        self.env._teardown = _nothing


def _load(settings: VerifiersSettings) -> Foreign:
    import verifiers

    module, _, function = settings.id.partition(":")
    if function:
        return getattr(import_module(module.replace("-", "_")), function)(**settings.arguments)
    return verifiers.load_environment(settings.id, **settings.arguments)


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Keep the handlers of Ctrl-C and SIGTERM, which an environment of verifiers replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in kept.items():
            signal.signal(number, handler)


def _prompt(row: Message) -> list[Message]:
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [as_openai(message) for message in messages]


async def _nothing() -> None:
    """Do nothing."""
