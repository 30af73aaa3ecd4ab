"""Grade-school maths (GSM8K) in XTuner's rows: JSON lines with data_source, prompt and reward_model.

`aitrain data gsm8k` makes them of the original ones; then `--rl-env-config '{"data_path": "gsm8k/train.jsonl"}'`.
"""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

NUMBER = r"""(?>(?<![\d^])                               # an exponent is no answer: cm^2
    (?:(?<!\w)[-\u2212])? \\?\$?                         # 10-5 ends in 5, not in -5; -$5, and \$5 as LaTeX has it
    (?:\d+ (?:(?:,|\{,\}|,\\!|\\,|[\u2009\u202f])\d{3})* # 1,000, also as LaTeX has it or with a thin space
    (?:\.\d+)? | (?<!\.)\.\d+))"""
ANY = re.compile(NUMBER, re.VERBOSE)
# At most 20 signs between, so that an answer of nothing but `#` costs no time; `#### 2. Adding up` is a heading.
MARKED = re.compile(rf"(?:\#{{4}}|boxed\{{) [^\w\n]{{0,20}}? ({NUMBER}) (?![.):]\**\ +\S)", re.VERBOSE)


def exact(text: str, truth: str) -> bool:
    """XTuner's rule: the last `#### <number>` in the last 300 characters, its commas aside, is the very string."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", text[-300:])
    return bool(found) and found[-1].replace(",", "") == truth


def lenient(text: str, truth: str) -> bool:
    """Also when the last number after `####` or `\\boxed{`, or with no such mark the last one, has the right value."""
    found = MARKED.findall(text) or ANY.findall(text)
    return exact(text, truth) or (bool(found) and _value(found[-1]) == Decimal(truth))


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[^\d.-]", "", number.replace("\u2212", "-")))


JUDGES = {"exact": exact, "lenient": lenient}


class GSM8K:
    """Asks word problems and gives 1.0 for the right number, 0.0 for anything else."""

    def __init__(self, data_path: str, judge: str | dict[str, str] = "exact", eval_path: str | None = None) -> None:
        own = judge if isinstance(judge, dict) else {"openai/gsm8k": judge}  # or one for each data source
        self.judges = {"openai/gsm8k": "exact", **own}
        for name in self.judges.values():
            if name not in JUDGES:
                raise ValueError(f"there is no judge {name!r}; there is: {', '.join(JUDGES)}")
        self.cases = self._read(data_path)
        self.held_out = [] if eval_path is None else self._read(eval_path)
        if eval_path is None:  # aitrain then holds out some of data_path
            self.build_eval_dataset = None  # type: ignore[method-assign, assignment]

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The rows of data_path."""
        return self.cases

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The rows of eval_path."""
        return self.held_out

    def score_episode(self, text: str, data_source: str, reward_model: dict[str, Any]) -> dict[str, float]:
        """What the judge for this data source says, and beside it the lenient judge, which ignores the format;
        `data_source` and `reward_model` come from the row."""
        truth = reward_model["ground_truth"]
        return {"score": float(JUDGES[self.judges[data_source]](text, truth)), "lenient": float(lenient(text, truth))}

    def reference(self, case_idx: int) -> str:
        """A right answer to row `case_idx`; the rows of eval_path are numbered on from those of data_path."""
        return f"#### {[*self.cases, *self.held_out][case_idx]['reward_model']['ground_truth']}"

    def _read(self, file: str) -> list[dict[str, Any]]:
        lines = enumerate(Path(file).expanduser().absolute().read_bytes().splitlines(), start=1)
        rows = [self._row(f"{file}, line {number}", line) for number, line in lines if line.strip()]
        if not rows:
            raise ValueError(f"{file} has no rows")
        return rows

    def _row(self, place: str, line: bytes) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads(line)
            _, source, truth = row["prompt"], str(row["data_source"]), row["reward_model"]["ground_truth"]
        except (ValueError, TypeError, KeyError):
            needs = "a JSON object with prompt, data_source and reward_model.ground_truth"
            raise ValueError(f"{place}: not {needs}; `aitrain data gsm8k` makes such rows") from None
        if source not in self.judges:
            hint = f'give it a judge: {{"judge": {{"{source}": "exact"}}}}'
            raise ValueError(f"{place}: unknown data_source {source!r} (known: {', '.join(self.judges)}); {hint}")
        if not isinstance(truth, str) or not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", truth):
            raise ValueError(f'{place}: ground_truth is {truth!r}, not a number as a string, such as "72"')
        return row
