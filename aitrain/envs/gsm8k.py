"""Grade-school maths, with the JSON lines of GSM8K, `--rl-env-config '{"data_path": "gsm8k/train.jsonl"}'`: rows with
question and answer as on GitHub, or XTuner's, with data_source, prompt and reward_model."""

import re
from decimal import Decimal
from typing import Any

from aitrain.environment.adapters.rows import read_rows
from aitrain.judges import gsm8k

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
NUMBER = r"""(?>(?<![\d^])                               # an exponent is no answer: cm^2
    (?:(?<!\w)[-\u2212])? \\?\$?                         # 10-5 ends in 5, not in -5; -$5, and \$5 as LaTeX has it
    (?:\d+ (?:(?:,|\{,\}|,\\!|\\,|[\u2009\u202f])\d{3})* # 1,000, also as LaTeX has it or with a thin space
    (?:\.\d+)? | (?<!\.)\.\d+))"""
ANY = re.compile(NUMBER, re.VERBOSE)
# At most 20 signs between, so that an answer of nothing but `#` costs no time; `#### 2. Adding up` is a heading.
MARKED = re.compile(rf"(?:\#{{4}}|boxed\{{) [^\w\n]{{0,20}}? ({NUMBER}) (?![.):]\**\ +\S)", re.VERBOSE)


def lenient(text: str, truth: str) -> bool:
    """Also when the last number after `####` or `\\boxed{`, or with no such mark the last one, has the right value."""
    found = MARKED.findall(text) or ANY.findall(text)
    return bool(gsm8k(text, truth)) or (bool(found) and _value(found[-1]) == Decimal(truth))


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[^\d.-]", "", number.replace("\u2212", "-")))


class GSM8K:
    """Asks word problems and gives 1.0 for the right number, 0.0 for anything else."""

    def __init__(self, data_path: str, judge: str = "exact", eval_path: str | None = None) -> None:
        if judge not in ("exact", "lenient"):
            raise ValueError(f"there is no judge {judge!r}; there is: exact, lenient")
        self.judge = judge
        self.cases = cases_of(data_path)
        self.held_out = [] if eval_path is None else cases_of(eval_path)
        if eval_path is None:  # aitrain then holds out some of data_path
            self.build_eval_dataset = None  # type: ignore[method-assign, assignment]

    def build_dataset(self) -> list[dict[str, Any]]:
        """The rows of data_path."""
        return self.cases

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        """The rows of eval_path."""
        return self.held_out

    def score_episode(self, text: str, reward_model: dict[str, Any]) -> dict[str, float]:
        """What the judge says: XTuner's rule, the last `#### number` in the last 300 characters, or the lenient one,
        which ignores the format, and stands beside it as a metric; `reward_model` comes from the row."""
        truth = reward_model["ground_truth"]
        scores = {"exact": gsm8k(text, truth), "lenient": float(lenient(text, truth))}
        return {"score": scores[self.judge], "lenient": scores["lenient"]}

    def reference(self, reward_model: dict[str, Any]) -> str:
        """A right answer to a row."""
        return f"#### {reward_model['ground_truth']}"


def cases_of(file: str) -> list[dict[str, Any]]:
    """The rows of a file, checked."""
    cases = []
    for place, row in read_rows(file):
        try:
            cases.append(_as_of_xtuner(row["question"], row["answer"]) if "question" in row else row)
            truth = cases[-1]["reward_model"]["ground_truth"]
        except (TypeError, KeyError):
            needs = "question and answer, or prompt and reward_model.ground_truth"
            raise ValueError(f"{place}: not a JSON object with {needs}") from None
        if not isinstance(truth, str) or not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", truth):
            raise ValueError(f'{place}: ground_truth is {truth!r}, not a number as a string, such as "72"')
    return cases


def _as_of_xtuner(question: str, answer: str) -> dict[str, Any]:
    """A row with the number after `####` in the answer as its truth."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "reward_model": {"style": "rule", "ground_truth": answer.rpartition("####")[2].strip().replace(",", "")},
    }
