"""Reward functions as TRL's trainers take them: `--rl-env reward:my_rewards.py:exact,short`.

Settings: those of `settings.py`; `data`, `split`, `columns` of `rows.py`, and `eval_data`; `weights` of the functions;
`group`, names of those that compare the answers of a group (found by a trial if it is not set).
"""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Self

from aitrain.environment.adapters.rows import Row, ScoredRows
from aitrain.environment.contract import arguments_for
from aitrain.environment.judges.judge_set import ANY_SOURCE, Judge, Judges, load
from aitrain.environment.user_modules import parse_id
from aitrain.errors import ConfigError
from aitrain.execution.async_calls import run_if_async

NOT_PASSED = {"prompt", "completion", "completion_ids"}
"""Columns that TRL does not pass to reward functions."""
Completion = str | list[dict[str, object]]
"""An answer: text for a prompt that is text, else messages."""


TRIED_ANSWERS = (
    "No.",
    "<think>One and one are two.</think>\n<answer>2</answer>",
    "So it is \\boxed{12}.\n#### 12",
    "The answer is B.",
    "C",
    '{"answer": 12}',
)
"""Answers in the usual formats, with which a trial finds out which reward functions compare answers."""


@dataclass(frozen=True)
class RewardFunction(Judge):
    """A reward function of TRL as a judge."""

    compares: bool = False
    """Whether it gets all answers of a group, and not each alone."""
    tokenizer: Any = None

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The reward of one answer, or those of a group, with what the function logs."""
        case = arguments["case"]
        if self.compares:
            return self.rewards(arguments["completions"], case)
        return self.rewards([arguments["completion"]], case, arguments.get("environment"))[0]

    def rewards(self, completions: Sequence[Completion], case: Row, environment: object = None) -> list[dict[str, Any]]:
        """The rewards of several answers, each with the mean of what the function logs under a name, as in TRL.

        Raises:
            ValueError: the function returned another number of rewards.
        """
        count, logged = len(completions), defaultdict[str, list[float]](list)
        arguments: Row = {name: [value] * count for name, value in case.items() if name not in NOT_PASSED}
        arguments |= {
            "prompts": [case["prompt"]] * count,
            "completions": completions,
            "log_extra": lambda column, values: None,
            "log_metric": lambda name, value: logged[name].append(value),
            "trainer_state": None,
        }
        if environment is not None:
            arguments["environments"] = [environment] * count
        if "completion_ids" in inspect.signature(self.function).parameters:
            texts = (one if isinstance(one, str) else one[-1]["content"] for one in completions)
            tokenized = (self.tokenizer(text, add_special_tokens=False) for text in texts)
            arguments["completion_ids"] = [tokens["input_ids"] for tokens in tokenized]
        rewards = list(run_if_async(self.function(**arguments_for(self.function, arguments))))
        if len(rewards) != count:
            raise ValueError(f"{self.name} returned {len(rewards)} rewards for {count} completions")
        metrics = {name: fmean(values) for name, values in logged.items()}
        return [{**metrics, "score": reward} for reward in rewards]

    def tried_on(self, row: Row) -> Self:
        """The function, which compares answers if it rewards them otherwise together than one by one, or fails at this
        trial.

        A function may compare only what it finds in an answer, or only right ones: so the trial also has the values of
        the row's columns, plain and in a form, and each answer twice.
        """
        values = [value for name, value in row.items() if name != "prompt" and isinstance(value, (str, int, float))]
        forms = [f"<answer>\\boxed{{{value}}}</answer>\n#### {value}" for value in values]
        texts = [*TRIED_ANSWERS, *map(str, values), *forms] * 2
        is_text = isinstance(row["prompt"], str)
        answers: list[Completion] = [text if is_text else [{"role": "assistant", "content": text}] for text in texts]
        try:
            together = [one["score"] for one in self.rewards(answers, row)]
            alone = [self.rewards([answer], row)[0]["score"] for answer in answers]
        except Exception:
            return replace(self, compares=True)
        return replace(self, compares=together != alone)


def reward_functions(
    id: str, weights: Sequence[float] | None = None, group: Sequence[str] | None = ()
) -> list[RewardFunction]:
    """The functions that an id names, with their weights; those in `group` compare answers, None: all of them may.

    Raises:
        ConfigError: it names none, there is no such function, or there are more or fewer weights.
    """
    places = [":".join(place) for place in parse_id(id)]
    if not all(map(all, parse_id(id))):
        raise ConfigError(f"rl_env: {id} names no function: FILE.py:FUNCTION\nRules are judges: --rl-env rows:FILE.")
    if weights is not None and len(weights) != len(places):
        raise ConfigError(f"rl_env_config: {len(weights)} weights for {len(places)} reward functions")
    given = zip(places, weights or [1.0] * len(places), strict=True)
    judges = list(load([{"judge": place, "weight": one, "range": "any"} for place, one in given]))
    if unknown := set(group or ()) - {judge.name for judge in judges}:
        raise ConfigError(f"rl_env_config: group: there is no function {', '.join(unknown)}")
    return [RewardFunction(**vars(judge), compares=group is None or judge.name in group) for judge in judges]


@dataclass(eq=False, kw_only=True)
class RewardFunctions(ScoredRows):
    """Asks the rows' prompts; the score of an answer is the weighted sum of the functions' rewards."""

    weights: Sequence[float] | None = None
    group: Sequence[str] | None = None
    sees_thoughts = True  # as in TRL

    def __post_init__(self) -> None:
        super().__post_init__()
        self.functions = reward_functions(self.id, self.weights, self.group)
        self.score_episode = Judges({ANY_SOURCE: self.functions})
        self.source_files = self.score_episode.source_files

    def build_dataset(self, tokenizer: Any) -> list[Row]:  # type: ignore[override]
        """The rows of `data`."""
        rows = self.cases()
        functions = [replace(function, tokenizer=tokenizer) for function in self.functions]
        if self.group is None:
            functions = [function.tried_on(rows[0]) for function in functions]
            comparing = ", ".join(function.name for function in functions if function.compares)
            self.dataset_note = (
                f"reward: functions that compare the answers of a group: {comparing or 'none'}"
                ' ("group" in --rl-env-config names them).'
            )
        self.score_episode = Judges({ANY_SOURCE: functions})
        return rows
