"""Classes written for TRL's environment_factory: `--rl-env trl:my_envs.py:Counter`.

Settings: size, seed, system and score_range as in `settings.py`; `data`, `split` and `columns` of `rows.py`; `rewards`,
reward functions as in `reward.py`, and their `weights`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aitrain.environment.adapters.reward import Rewards
from aitrain.environment.adapters.rows import RowSource
from aitrain.environment.adapters.settings import read_score_range, weighted
from aitrain.environment.adapters.user_objects import check_objects, load_object, parse_id
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
        data: str | Sequence[str] | Mapping[str, float] | None = None,
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
        self.factory = load_object(*parse_id(id)[0])
        self.rewards = Rewards(parse_id(rewards) if rewards else [], weights)
        if not rewards and not hasattr(self.factory, "get_reward"):
            raise ConfigError(f"rl_env_config: {id} has no get_reward: name reward functions with `rewards`")
        self.source = None if data is None else RowSource(data, split, columns or {}, size, seed, system)
        self.size, self.prompt = size or 200, [{"role": "system", "content": system}] if system else []

    def build_dataset(self) -> list[dict[str, Any]]:
        """The rows of `data`; without it, rows without a prompt, as `reset` says what is asked."""
        rows = self.source.cases() if self.source else [{"prompt": self.prompt} for _ in range(self.size)]
        return [{**row, "trl_row": row} for row in rows]

    def start(self, trl_row: dict[str, Any], prompt: Any) -> _TRLEpisode:
        """A new instance, reset with the row."""
        made = self.factory()
        return _TRLEpisode(made, run_if_async(made.reset(**trl_row)), self.rewards, trl_row)


class _TRLEpisode:
    """One instance of the class."""

    def __init__(self, made: Any, said: Any, rewards: Rewards, row: dict[str, Any]) -> None:
        self.made, self.said, self.rewards, self.row = made, said, rewards, row
        self.reply, self.tool_errors = "", 0

    def opening(self) -> Any:
        """What `reset` returned, which continues the prompt's last message."""
        return self.said

    def get_tools(self) -> list[Callable[..., Any]]:
        """The public methods of the class."""
        names = [name for name, _ in inspect.getmembers(type(self.made), inspect.isfunction) if name[0] != "_"]
        return [self._tool(getattr(self.made, name)) for name in names if name not in ("reset", "get_reward")]

    def step(self, reply: str) -> None:
        """An answer without a call is the last one."""
        self.reply = reply

    def score(self) -> Score:
        """The weighted sum of the reward functions' rewards, and of the class's own."""
        own: dict[str, tuple[float | None, float]] = {}
        if hasattr(self.made, "get_reward"):
            own[type(self.made).__name__] = (run_if_async(self.made.get_reward()), 1.0)
        return weighted(own)

    def _tool(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method; an exception is an answer to the model, as in TRL."""

        @functools.wraps(method)
        def call(*arguments: Any, **keywords: Any) -> Any:
            try:
                return run_if_async(method(*arguments, **keywords))
            except Exception as error:
                self.tool_errors += 1
                return {"error": str(error)}

        return call
