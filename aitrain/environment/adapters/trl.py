"""Classes written for TRL's environment_factory: `--rl-env trl:my_envs.py:Counter`.

Settings: size, seed, system and score_range as in `settings.py`; `data`, `split` and `columns` of `rows.py`; `rewards`,
reward functions named as in `reward.py`, and their `weights`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aitrain.environment.adapters.reward_functions import Rewards, check_functions
from aitrain.environment.adapters.rows import Data, Row, RowSource, check_data
from aitrain.environment.adapters.settings import read_score_range, weighted
from aitrain.environment.adapters.user_objects import check_objects, load_object, parse_id, source_files
from aitrain.environment.contract import Score
from aitrain.environment.requirements import EnvRequirements
from aitrain.errors import ConfigError
from aitrain.execution.async_calls import run_if_async


class TRLEnvironment:
    """A new instance of the class for each episode: its public methods are the tools, `reset` gets the row.

    An episode ends with the first answer without a tool call.
    """

    def __init__(
        self,
        id: str,
        /,
        *,
        data: Data | None = None,
        split: str = "train",
        columns: Mapping[str, str] | None = None,
        rewards: str | None = None,
        weights: Sequence[float] | None = None,
        size: int | None = None,
        seed: int | None = None,
        system: str | None = None,
        score_range: object = None,
    ) -> None:
        self.requirements = EnvRequirements("process", score_range=read_score_range(score_range, "trl"))
        self.factory, places = load_object(*parse_id(id)[0]), parse_id(rewards) if rewards else []
        self.rewards, self.source_files = Rewards(places, weights), source_files([*parse_id(id), *places])
        if not rewards and not hasattr(self.factory, "get_reward"):
            raise ConfigError(f"rl_env_config: {id} has no get_reward: name reward functions with `rewards`")
        self.source = None if data is None else RowSource(data, split, columns or {}, size, seed, system)
        self.size, self.prompt = size or 200, [{"role": "system", "content": system}] if system else []

    def build_dataset(self) -> list[Row]:
        """The rows of `data`; without it, rows without a prompt, as `reset` says what is asked."""
        if self.source is None:
            return [{"prompt": self.prompt, "trl_row": {}} for _ in range(self.size)]
        return [{**row, "trl_row": row} for row in self.source.cases()]

    def start(self, trl_row: Row) -> _TRLEpisode:
        """A new instance, reset with the row."""
        made = self.factory()
        return _TRLEpisode(made, run_if_async(made.reset(**trl_row)), self.rewards, trl_row)


class _TRLEpisode:
    """One instance of the class."""

    def __init__(self, made: Any, said: object, rewards: Rewards, row: Row) -> None:
        self.made, self.said, self.rewards, self.row, self.reply = made, said, rewards, row, ""

    def opening(self) -> object:
        """What `reset` returned, which continues the prompt's last message."""
        return self.said

    def get_tools(self) -> list[Callable[..., Any]]:
        """The public methods of the class."""
        names = [name for name, _ in inspect.getmembers(type(self.made), inspect.isfunction) if name[0] != "_"]
        return [_answering(getattr(self.made, name)) for name in names if name not in ("reset", "get_reward")]

    def step(self, reply: str) -> None:
        """An answer without a call is the last one."""
        self.reply = reply

    def score(self) -> Score:
        """The weighted sum of the reward functions' rewards, and of the class's own with the weight 1."""
        prompt = self.row.get("prompt", [])
        completion = [{"role": "assistant", "content": self.reply}]
        score = self.rewards.of_one(self.row, prompts=prompt, completions=completion, environments=self.made)
        if not hasattr(self.made, "get_reward"):
            return score
        own = run_if_async(self.made.get_reward())
        total = weighted({type(self.made).__name__: (own, 1.0), "rewards": (score.score, 1.0)})
        return Score(total.score, {**total.metrics, **score.metrics})


def _answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """A tool whose exceptions are answers to the model, as in TRL."""

    @functools.wraps(method)
    def call(*arguments: object, **keywords: object) -> object:
        try:
            return run_if_async(method(*arguments, **keywords))
        except Exception as error:
            return {"error": str(error)}

    return call


def check_id(id: str, settings: Mapping[str, object]) -> None:
    """Check class, functions and files without running anything.

    Raises:
        ConfigError: one of them does not exist.
    """
    check_objects(parse_id(id), "class")
    if settings.get("rewards"):
        check_functions(parse_id(str(settings["rewards"])))
    check_data(settings.get("data"))
