"""Classes written for TRL's environment_factory: `--rl-env trl:my_envs.py:Counter`.

Settings: size, seed, system and score_range as in `settings.py`; `data`, `split` and `columns` of `rows.py`; `rewards`,
reward functions named as in `reward.py`, and their `weights`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aitrain.environment.adapters.reward import Completion, reward_functions
from aitrain.environment.adapters.rows import Data, Row, RowSource
from aitrain.environment.adapters.settings import prompted, seed_generators
from aitrain.environment.contract import Score, as_messages
from aitrain.environment.judges.judge_set import ANY_SOURCE, Judge, Judges
from aitrain.environment.user_modules import load_function, parse_id, source_files
from aitrain.errors import ConfigError
from aitrain.execution.async_calls import run_if_async


@dataclass(eq=False, kw_only=True)
class TRLEnvironment(RowSource):
    """A new instance of the class for each episode: its public methods are the tools, `reset` gets the row.

    An episode ends with the first answer without a tool call.
    """

    data: Data | None = None
    rewards: str | None = None
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = parse_id(self.id)
        self.factory = load_function("rl_env", ":".join(own[0]))
        self.functions = reward_functions(self.rewards, self.weights) if self.rewards else []
        self.own: list[Judge] = []
        if hasattr(self.factory, "get_reward"):
            self.own.append(Judge(own[0][1], _own_reward, bounds=(-math.inf, math.inf)))
        self.judges = Judges({ANY_SOURCE: [*self.functions, *self.own]})
        self.source_files = source_files(own, [self.factory, *(one.function for one in self.functions)])
        if not self.functions and not self.own:
            raise ConfigError(f"rl_env_config: {self.id} has no get_reward: name reward functions with `rewards`")

    def build_dataset(self, tokenizer: Any) -> list[Row]:
        """The rows of `data`; without it, rows without a prompt, as `reset` says what is asked."""
        functions = [replace(function, tokenizer=tokenizer) for function in self.functions]
        self.judges = Judges({ANY_SOURCE: [*functions, *self.own]})
        if self.data is None:
            return [{"prompt": prompted([], self.system), "trl_row": {}} for _ in range(self.size or 200)]
        # without the message that `reset` continues
        return [{**row, "prompt": as_messages(row["prompt"])[:-1], "trl_row": row} for row in self.cases()]

    def start(self, trl_row: Row, seed: int) -> _TRLEpisode:
        """A new instance, reset with the row; what it draws there from the global random numbers is the same in all
        episodes of a group."""
        seed_generators(seed)
        made = self.factory()
        said = run_if_async(made.reset(**trl_row))
        return _TRLEpisode(made, said, self.judges, trl_row)


class _TRLEpisode:
    """One instance of the class."""

    def __init__(self, made: Any, said: Any, judges: Judges, row: Row) -> None:
        self.made, self.judges, self.row = made, judges, row
        self.prompt = as_messages(row.get("prompt", []))
        if said is not None:  # appended to the last message, without a separator, as in TRL
            *before, last = self.prompt or [{"role": "user", "content": type(said)()}]
            self.prompt = [*before, {**last, "content": last["content"] + said}]  # texts, or lists of parts

    def opening(self) -> list[dict[str, Any]] | None:
        """The prompt's last message, continued by what `reset` returned."""
        return self.prompt[-1:] or None

    def get_tools(self) -> list[Callable[..., Any]]:
        """The public methods of the class."""
        names = [name for name, _ in inspect.getmembers(type(self.made), inspect.isfunction) if name[0] != "_"]
        return [_answering(getattr(self.made, name)) for name in names if name not in ("reset", "get_reward")]

    def step(self, reply: str) -> None:
        """An answer without a call is the last one."""

    def score(self, completion: Completion) -> Score:
        """The weighted sum of the reward functions' rewards, and of the class's own with the weight 1. As in TRL, the
        functions get the whole conversation, with calls of tools and their results."""
        case = {**self.row, "prompt": self.prompt}
        return self.judges(completion=completion, case=case, environment=self.made)


def _own_reward(environment: Any) -> Any:
    """The reward of the class itself."""
    return environment.get_reward()


def _answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """A tool whose exceptions are answers to the model, as in TRL."""

    @functools.wraps(method)
    def call(*arguments: object, **keywords: object) -> object:
        try:
            return run_if_async(method(*arguments, **keywords))
        except Exception as error:
            return {"error": str(error)}

    return call
