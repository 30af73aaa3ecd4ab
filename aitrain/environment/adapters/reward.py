"""Reward functions as TRL's trainers take them: `--rl-env reward:my_rewards.py:exact,short`, or a rule by name, such as
`reward:gsm8k`.

Settings: those of `settings.py`; `data`, `split`, `columns` of `rows.py`, and `eval_data`; `weights` of the functions;
`group`, names of those that compare the answers of a group.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aitrain.environment.adapters.rows import Row, ScoredRows, files_of
from aitrain.environment.adapters.settings import requires
from aitrain.environment.contract import Score, arguments_for
from aitrain.environment.judges.judge_set import ANY_SOURCE, Judge, Judges
from aitrain.environment.user_modules import parse_id
from aitrain.errors import ConfigError, did_you_mean
from aitrain.execution.async_calls import run_if_async

NOT_PASSED = {"prompt", "completion", "completion_ids"}
"""Columns that TRL does not pass to reward functions."""
Completion = str | list[dict[str, object]]
"""An answer: text for a prompt that is text, else messages."""


def reward_judges(id: str, weights: Sequence[float] | None = None) -> list[Judge]:
    """The functions that an id names, or a rule, with their weights; not loaded, see RewardFunction.

    Raises:
        ConfigError: there are more or fewer weights.
    """
    places = [":".join(filter(None, place)) for place in parse_id(id)]
    if weights is not None and len(weights) != len(places):
        raise ConfigError(f"rl_env_config: {len(weights)} weights for {len(places)} reward functions")
    given = zip(places, weights or [1.0] * len(places), strict=True)
    return list(Judges.described([{"judge": place, "weight": weight, "range": "any"} for place, weight in given]))


class RewardFunction:
    """A reward function of TRL, or a rule by name, as a judge.

    Raises:
        ConfigError: there is no such function, or no such rule.
    """

    def __init__(self, judge: Judge) -> None:
        self.loaded, self.name, self.is_rule = judge.load(), judge.name, judge.users_place is None
        self.function = self.loaded.function

    def judge(self, compares: bool = False) -> Judge:
        """The judge of one answer, or of the answers of a group."""
        return self.loaded if self.is_rule else replace(self.loaded, function=self.together if compares else self.alone)

    def alone(
        self, completion: Completion, text: str, case: Row,
        tokenizer: Any = None, environment: object = None,
    ) -> object:  # fmt: skip
        """The reward of one answer, with what the function logs."""
        return self.together([completion], [text], case, tokenizer, environment)[0]

    def together(
        self, completions: Sequence[Completion], texts: Sequence[str], case: Row,
        tokenizer: Any = None, environment: object = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """The rewards of several answers.

        Raises:
            ValueError: the function returned another number of rewards.
        """
        count, logged = len(texts), dict[str, float]()
        arguments: Row = {name: [value] * count for name, value in case.items() if name not in NOT_PASSED}
        arguments |= {"prompts": [case["prompt"]] * count, "completions": completions}
        if environment is not None:
            arguments["environments"] = [environment] * count
        arguments |= {"log_extra": lambda column, values: None, "log_metric": logged.__setitem__, "trainer_state": None}
        if "completion_ids" in inspect.signature(self.function).parameters:
            arguments["completion_ids"] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        rewards = list(run_if_async(self.function(**arguments_for(self.function, arguments))))
        if len(rewards) != count:
            raise ValueError(f"{self.name} returned {len(rewards)} rewards for {count} completions")
        return [{**logged, "score": reward} for reward in rewards]


@dataclass(eq=False)
class RewardFunctions(ScoredRows):
    """Asks the rows' prompts; the score of an answer is the weighted sum of the functions' rewards."""

    id: str
    weights: Sequence[float] | None = field(default=None, kw_only=True)
    group: Sequence[str] = field(default=(), kw_only=True)
    score_range: object = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        functions = [RewardFunction(judge) for judge in reward_judges(self.id, self.weights)]
        self.sees_thoughts = not all(function.is_rule for function in functions)  # as in TRL
        # a rule gives 0 or 1
        is_rule = self.weights is None and len(functions) == 1 and functions[0].is_rule
        known = "0,1" if is_rule and self.score_range is None else self.score_range
        self.requirements = requires(known, "reward")
        self.source_files = Judges({ANY_SOURCE: [function.loaded for function in functions]}).source_files
        names = [function.name for function in functions]
        for name in self.group:
            if name not in names:
                raise ConfigError(f"rl_env_config: group: there is no function {name}.{did_you_mean(name, names)}")
        self.use(Judges({ANY_SOURCE: [function.judge(function.name in self.group) for function in functions]}))

    def build_dataset(self, tokenizer: Any) -> list[Row]:  # type: ignore[override]
        """The rows of `data`."""
        self.tokenizer = tokenizer
        return super().build_dataset()

    def score_episode(self, **episode: Any) -> Score:
        """The weighted sum of the functions that reward one answer."""
        return self.judge_set(**{**episode, "tokenizer": self.tokenizer})

    def score_group(self, **group: Any) -> list[Score]:
        """The scores of a group, with the functions that compare its answers."""
        return self.judge_set.compare(**group, tokenizer=self.tokenizer)


def check_id(id: str, settings: Mapping[str, object]) -> None:
    """Check functions and files without running anything.

    Raises:
        ConfigError: a file, or a function in it, does not exist.
    """
    for judge in reward_judges(id):
        judge.check()
    for name in ("data", "eval_data"):
        if settings.get(name) is not None:
            files_of(settings[name])
