"""Reward functions as TRL's trainers take them: `--rl-env reward:my_rewards.py:exact,short`, or a rule by name, such as
`reward:gsm8k`.

Settings: those of `settings.py`; `data`, `split`, `columns` of `rows.py`, and `eval_data`; `weights` of the functions;
`group`, names of those that compare the answers of a group (found by a trial if it is not set).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from aitrain.environment.adapters.answer_rules import EXAMPLES, Completion
from aitrain.environment.adapters.reward_functions import Lists, Rewards, check_functions
from aitrain.environment.adapters.rows import Data, Row, RowSource, check_data
from aitrain.environment.adapters.settings import read_score_range
from aitrain.environment.contract import Score
from aitrain.environment.requirements import EnvRequirements
from aitrain.environment.user_modules import parse_id, source_files

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
        self.requirements = EnvRequirements(
            "process", score_range=read_score_range("0,1" if is_known else score_range, "reward")
        )
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
