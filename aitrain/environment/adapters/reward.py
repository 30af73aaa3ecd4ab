"""Reward functions as TRL's trainers take them: `--rl-env reward:my_rewards.py:exact,short`, or a rule by name, such as
`reward:gsm8k`.

Settings: those of `settings.py`; `data`, `split`, `columns` of `rows.py`, and `eval_data`; `weights` of the functions;
`group`, names of those that compare the answers of a group (found by a trial if it is not set).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aitrain.environment.adapters.rows import Data, Row, RowSource, check_data
from aitrain.environment.adapters.settings import requires, weighted
from aitrain.environment.contract import Score, arguments_for
from aitrain.environment.user_modules import Place, check_objects, load_object, parse_id, source_files
from aitrain.errors import ConfigError, did_you_mean
from aitrain.execution.async_calls import run_if_async

Completion = str | list[dict[str, object]]
"""An answer: text for a prompt that is text, else messages."""
NUMBER = re.compile(r"#### (-?[0-9.,]+)")


def gsm8k(text: str, ground_truth: object) -> float:
    """1.0 if the last `#### number` within the last 300 characters is the ground truth, commas aside."""
    found = NUMBER.findall(text[-300:])
    return float(bool(found) and found[-1].replace(",", "") == "".join(str(ground_truth).replace(",", "").split()))


def boxed(text: str, ground_truth: object) -> float:
    r"""1.0 if the content of the last `\boxed{...}`, up to its own closing brace, is the ground truth, white space
    aside."""
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return float("".join(rest[:place].split()) == "".join(str(ground_truth).split()))
    return 0.0


def _of_lists(rule: Callable[[str, object], float]) -> Callable[..., list[float]]:
    """A rule as a reward function."""

    def rewards(completions: Sequence[Completion], ground_truth: Sequence[object], **_: object) -> list[float]:
        texts = [one if isinstance(one, str) else str(one[-1].get("content") or "") for one in completions]
        return [rule(text, truth) for text, truth in zip(texts, ground_truth, strict=True)]

    return rewards


RULES = {"gsm8k": _of_lists(gsm8k), "boxed": _of_lists(boxed)}
"""The functions that `--rl-env reward:NAME` knows, for rows with `ground_truth`."""
EXAMPLES = {"gsm8k": "#### {}", "boxed": r"\boxed{{{}}}"}
"""A right answer by each rule."""


Lists = Mapping[str, Sequence[object]]
"""Arguments of reward functions, one entry for each completion."""
NOT_PASSED = {"prompt", "completion", "completion_ids"}
"""Columns that TRL does not pass to reward functions."""


class Rewards:
    """Functions by name, with their weights."""

    def __init__(self, places: Sequence[Place], weights: Sequence[float] | None) -> None:
        if weights is not None and len(weights) != len(places):
            raise ConfigError(f"rl_env_config: {len(weights)} weights for {len(places)} reward functions")
        self.functions: dict[str, Callable[..., Any]] = {}
        self.weights: dict[str, float] = {}
        for (module, name), weight in zip(places, weights or [1.0] * len(places), strict=True):
            own = name if name not in self.functions else f"{name}_{len(self.functions)}"
            self.functions[own] = load_object(module, name) if module else RULES[name]
            self.weights[own] = float(weight)

    def takes(self, name: str) -> bool:
        """Whether a function names this parameter."""
        return any(name in inspect.signature(function).parameters for function in self.functions.values())

    def of_one(self, row: Mapping[str, object], **arguments: object) -> Score:
        """The weighted sum for one completion; each argument becomes a list of one."""
        rewards, metrics = self.call(self.functions, row, {name: [value] for name, value in arguments.items()})
        score = self.total({name: values[0] for name, values in rewards.items()})
        return Score(score.score, {**metrics, **score.metrics})

    def total(self, rewards: Mapping[str, float | None]) -> Score:
        """The weighted sum of one reward of each function."""
        return weighted({name: (rewards.get(name), weight) for name, weight in self.weights.items()})

    def call(
        self, names: Iterable[str], row: Mapping[str, object], lists: Lists
    ) -> tuple[dict[str, list[float | None]], dict[str, float]]:
        """The rewards of each function for completions of one row, and the metrics that functions logged.

        Raises:
            ValueError: a function returned another number of rewards.
        """
        count, metrics, rewards = len(lists["completions"]), dict[str, float](), {}
        columns = {name: [value] * count for name, value in row.items() if name not in NOT_PASSED}
        log = {"log_extra": lambda column, values: None, "log_metric": metrics.__setitem__, "trainer_state": None}
        for name in names:
            function = self.functions[name]
            rewards[name] = list(run_if_async(function(**arguments_for(function, {**columns, **lists, **log}))))
            if len(rewards[name]) != count:
                raise ValueError(f"{name} returned {len(rewards[name])} rewards for {count} completions")
        return rewards, metrics

    def comparing(self, row: Mapping[str, object], lists: Lists) -> tuple[list[str], list[str]]:
        """Names of the functions that reward these completions otherwise together than one by one, or only together;
        and of those that reward them in neither way."""
        found, failed = list[str](), list[str]()
        for name in self.functions:
            try:
                together = self.call([name], row, lists)[0][name]
            except Exception:
                failed.append(name)  # the first episode shows it, with its place
                continue
            try:
                alone = [
                    self.call([name], row, {key: [values[i]] for key, values in lists.items()})[0][name][0]
                    for i in range(len(together))
                ]
            except Exception:
                alone = []
            found += [name] if together != alone else []
        return found, failed


def check_functions(places: Sequence[Place]) -> None:
    """Check functions and rules without running anything.

    Raises:
        ConfigError: a file, or a function in it, does not exist, or there is no such rule.
    """
    for module, name in places:
        if not module and name not in RULES:
            raise ConfigError(
                f"rl_env: there is no reward function {name}.{did_you_mean(name, RULES)}\nName functions of a file, as"
                f" in reward:my_rewards.py:exact,short, or a rule: {', '.join(RULES)}"
            )
    check_objects([place for place in places if place[0]], "function")


TRIED_ANSWERS = (
    "No.",
    "<think>One and one are two.</think>\n<answer>2</answer>",
    "So it is \\boxed{12}.\n#### 12",
    "The answer is B.",
    "C",
    '{"answer": 12}',
)
"""Answers of the trial that finds the functions that compare answers, in the forms that answers are asked for in."""
LONGEST_VALUE = 200
"""Characters of a row's value up to which it may be an answer."""


class RewardFunctions:
    """Asks the rows' prompts; the score of an answer is the weighted sum of the functions' rewards."""

    def __init__(
        self,
        id: str,
        /,
        *,
        data: Data,
        split: str = "train",
        eval_data: Data | None = None,
        columns: Mapping[str, str] | None = None,
        weights: Sequence[float] | None = None,
        group: Sequence[str] | None = None,
        size: int | None = None,
        seed: int | None = None,
        system: str | None = None,
        few_shot: int = 0,
        score_range: object = None,
    ) -> None:
        places = parse_id(id)
        self.example = EXAMPLES.get(places[0][1]) if len(places) == 1 and not places[0][0] else None
        is_known = self.example is not None and score_range is None and weights is None  # a rule gives 0 or 1
        self.requirements = requires("0,1" if is_known else score_range, "reward")
        self.rewards = Rewards(places, weights)
        self.group = group if any(module for module, _ in places) else []  # a rule looks at one answer
        self.source_files = source_files(places, self.rewards.functions.values())
        self.source = RowSource(data, split, columns or {}, size, seed, system, few_shot)
        self.eval_source = RowSource(eval_data or data, split, columns or {}, system=system, few_shot=few_shot)
        if eval_data is None:
            self.build_eval_dataset = None  # type: ignore[method-assign, assignment]

    def build_dataset(self, tokenizer: Any) -> list[Row]:
        """The rows of `data`."""
        self.tokenizer = tokenizer
        rows = self.source.cases()
        if self.group is None:
            self.comparing, failed = self._comparing(rows[0])
            others = f"; not known, as the trial failed: {', '.join(failed)}" if failed else ""
            self.dataset_note = (
                f"reward: functions that compare the answers of a group: {', '.join(self.comparing) or 'none'}{others}"
                ' ("group" in --rl-env-config names them).'
            )
        else:
            self.comparing = list(self.group)
        if not self.comparing:
            self.score_group = None  # type: ignore[method-assign, assignment]
        return rows

    def build_eval_dataset(self) -> list[Row]:
        """The rows of `eval_data`."""
        return self.eval_source.cases()

    def score_episode(self, completion: Completion, text: str, case: Row) -> Score:
        """The weighted sum for one answer; functions that compare answers get it alone, and may fail with it."""
        lists = self._arguments(case, [completion], [text])
        rewards, logged = self.rewards.call(self.rewards.functions.keys() - set(self.comparing), case, lists)
        for name in self.comparing:
            with suppress(Exception):
                rewards |= self.rewards.call([name], case, lists)[0]
        score = self.rewards.total({name: values[0] for name, values in rewards.items()})
        return Score(score.score, {**logged, **score.metrics})

    def score_group(
        self, completions: list[Completion], texts: list[str], metrics: list[dict[str, float]], case: Row
    ) -> list[Score]:
        """A score for each answer of a group, with the rewards of the functions that compare them."""
        rewards, logged = self.rewards.call(self.comparing, case, self._arguments(case, completions, texts))
        scores = []
        for number, own in enumerate(metrics):
            compared = {name: values[number] for name, values in rewards.items()}
            scores.append(self.rewards.total({**{name: own.get(name) for name in self.rewards.functions}, **compared}))
        return [
            Score(score.score, {**own, **logged, **score.metrics}) for own, score in zip(metrics, scores, strict=True)
        ]

    def reference(self, case: Row) -> str | None:
        """The right answer of a row, if it has one."""
        if self.example and "ground_truth" in case:
            return self.example.format(case["ground_truth"])
        return None if case.get("answer") is None else str(case["answer"])

    def _arguments(self, case: Row, completions: Sequence[Completion], texts: list[str]) -> Lists:
        lists: dict[str, Sequence[object]] = {"prompts": [case["prompt"]] * len(texts), "completions": completions}
        if self.rewards.takes("completion_ids"):
            lists["completion_ids"] = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return lists

    def _comparing(self, row: Row) -> tuple[list[str], list[str]]:
        """Names of the functions that compare answers, by a trial, and of those for which it failed.

        A function may compare only what it finds in an answer, or only right ones: so the trial also has the values of
        the row's columns, plain and in a form, and each answer twice.
        """
        columns = [value for name, value in row.items() if name != "prompt" and isinstance(value, (str, int, float))]
        values = [value for value in [self.reference(row), *map(str, columns)] if value and len(value) <= LONGEST_VALUE]
        right = [text for value in values for text in (value, f"<answer>\\boxed{{{value}}}</answer>\n#### {value}")]
        texts = list(dict.fromkeys([*TRIED_ANSWERS, *right])) * 2
        is_chat = not isinstance(row["prompt"], str)
        completions: list[Completion] = [
            [{"role": "assistant", "content": text}] if is_chat else text for text in texts
        ]
        return self.rewards.comparing(row, self._arguments(row, completions, texts))


def check_id(id: str, settings: Mapping[str, object]) -> None:
    """Check functions and files without running anything.

    Raises:
        ConfigError: a file, or a function in it, does not exist.
    """
    check_functions(parse_id(id))
    for name in ("data", "eval_data"):
        check_data(settings.get(name))
