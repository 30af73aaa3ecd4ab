"""Reward functions as TRL's trainers take them: `--rl-env reward:my_rewards.py:exact,short`, or a rule by name, such as
`reward:gsm8k`.

Settings: those of `settings.py`; `data`, `split`, `columns` of `rows.py`, and `eval_data`; `weights` of the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aitrain.environment.adapters.answer_rules import EXAMPLES, RULES
from aitrain.environment.adapters.rows import RowSource
from aitrain.environment.adapters.settings import read_score_range, weighted
from aitrain.environment.adapters.user_objects import check_objects, load_object, parse_id
from aitrain.environment.contract import Score, arguments_for
from aitrain.environment.requirements import EnvRequirements
from aitrain.errors import ConfigError, did_you_mean
from aitrain.execution.async_calls import run_if_async

NOT_PASSED = {"prompt", "completion", "completion_ids"}
"""Columns that TRL does not pass to reward functions."""


class RewardFunctions:
    """Asks the rows' prompts, and scores each group of answers by the weighted sum of the functions' rewards."""

    def __init__(
        self,
        id: str,
        /,
        *,
        data: str | Sequence[str] | Mapping[str, float],
        split: str = "train",
        eval_data: str | Sequence[str] | None = None,
        columns: Mapping[str, str] | None = None,
        weights: Sequence[float] | None = None,
        size: int | None = None,
        seed: int | None = None,
        system: str | None = None,
        few_shot: int = 0,
        score_range: object = None,
    ) -> None:
        names = parse_id(id)
        is_rule = all(not module for module, _ in names) and len(names) == 1
        given = "0,1" if is_rule and score_range is None and weights is None else score_range
        self.requirements = EnvRequirements("process", score_range=read_score_range(given, "reward"))
        self.rewards = Rewards(names, weights)
        self.example = EXAMPLES.get(names[0][1]) if is_rule else None
        self.source = RowSource(data, split, columns or {}, size, seed, system, few_shot)
        self.source.check()
        self.eval_source = RowSource(eval_data or data, split, columns or {}, system=system)
        if eval_data is None:
            self.build_eval_dataset = None  # type: ignore[method-assign, assignment]

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The rows of `data`."""
        self.tokenizer = tokenizer
        rows = self.source.cases()
        self.answers = [self._answer(row) for row in rows]
        return rows

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        """The rows of `eval_data`."""
        rows = self.eval_source.cases()
        self.answers += [self._answer(row) for row in rows]
        return rows

    def score_episode(self) -> None:
        """Nothing yet: the whole group is scored at once."""

    def score_group(self, completions: list[Any], texts: list[str], prompt: Any, case: dict[str, Any]) -> list[Score]:
        """A score for each answer of a group."""
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return self.rewards.scores(case, prompts=[prompt] * len(texts), completions=completions, completion_ids=ids)

    def reference(self, case_idx: int) -> str | None:
        """The right answer of a row, if it has one."""
        return self.answers[case_idx]

    def _answer(self, row: Mapping[str, Any]) -> str | None:
        if self.example and "ground_truth" in row:
            return self.example.format(row["ground_truth"])
        return None if row.get("answer") is None else str(row["answer"])


class Rewards:
    """Several reward functions with their weights."""

    def __init__(self, places: Sequence[tuple[str, str]], weights: Sequence[float] | None) -> None:
        if weights is not None and len(weights) != len(places):
            raise ConfigError(f"rl_env_config: {len(weights)} weights for {len(places)} reward functions")
        loaded = [(name, load_object(module, name) if module else RULES[name]) for module, name in places]
        self.functions: dict[str, Callable[..., Any]] = {}
        for name, function in loaded:
            self.functions[name if name not in self.functions else f"{name}_{len(self.functions)}"] = function
        self.weights = list(weights) if weights is not None else [1.0] * len(places)

    def scores(self, row: Mapping[str, Any], **lists: list[Any]) -> list[Score]:
        """A score for each entry of the lists, with every function's reward as a metric.

        Raises:
            ValueError: a function returned another number of rewards.
        """
        count, metrics = len(lists["completions"]), dict[str, float]()
        columns = {name: [value] * count for name, value in row.items() if name not in NOT_PASSED}
        log = {"log_extra": lambda column, values: None, "log_metric": metrics.__setitem__, "trainer_state": None}
        rewards = {}
        for name, function in self.functions.items():
            rewards[name] = list(run_if_async(function(**arguments_for(function, {**columns, **lists, **log}))))
            if len(rewards[name]) != count:
                raise ValueError(f"{name} returned {len(rewards[name])} rewards for {count} completions")
        weights = dict(zip(self.functions, self.weights, strict=True))
        found = [weighted({name: (rewards[name][i], weights[name]) for name in rewards}) for i in range(count)]
        return [Score(score.score, {**metrics, **score.metrics}) for score in found]


def check_id(id: str, settings: Mapping[str, Any]) -> None:
    """Check functions and files without running anything.

    Raises:
        ConfigError: a file, or a function in it, does not exist.
    """
    places = parse_id(id)
    for _, name in [place for place in places if not place[0]]:
        if name not in RULES:
            rules = ", ".join(RULES)
            raise ConfigError(
                f"rl_env: there is no reward function {name}.{did_you_mean(name, RULES)}\nName functions of a file, as in"
                f" reward:my_rewards.py:exact,short, or a rule: {rules}"
            )
    check_objects([place for place in places if place[0]], "function")
    RowSource(settings["data"], split=str(settings.get("split", "train"))).check()
