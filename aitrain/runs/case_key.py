"""Matches the cases of two scorings by their content: prompt and row, never their number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from aitrain.runs.rollout_record import RolloutRecord


@dataclass(frozen=True, slots=True)
class CaseKey:
    """What identifies a case in another scoring: hashes of its content, and the environment's seed."""

    content: str
    seed: int | None
    prompt: str
    """The same for cases with an equal prompt."""

    @classmethod
    def of(cls, record: RolloutRecord) -> CaseKey:
        """The key of an episode's case."""
        text = json.dumps([record.prompt, record.row], sort_keys=True)
        return cls(_hash(text), record.seed, prompt_key(record.prompt))


def prompt_key(prompt: object) -> str:
    """A hash that is equal for equal prompts, as rows and records have them."""
    return _hash(json.dumps(prompt, sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def match_cases(a: Mapping[str, CaseKey], b: Mapping[str, CaseKey]) -> list[tuple[str, str]]:
    """Pairs of cases with equal content, in the order of `a`, each case at most once.

    Of rows that repeat, those with equal seeds belong together, as a seed may decide what is asked. The others are
    matched in the order in which they come.
    """
    by_seed, by_content = dict[CaseKey, list[str]](), dict[str, list[str]]()
    for case, key in reversed(list(b.items())):  # reversed, as the first is taken from the end
        by_seed.setdefault(key, []).append(case)
        by_content.setdefault(key.content, []).append(case)
    found = {case: by_seed[key].pop() for case, key in a.items() if by_seed.get(key)}
    taken = set(found.values())
    for case, key in a.items():
        left = by_content.get(key.content, [])
        while left and case not in found:
            other = left.pop()
            if other not in taken:
                found[case] = other
    return [(case, found[case]) for case in a if case in found]
