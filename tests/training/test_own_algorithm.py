"""An algorithm with advantages of its own: the example of docs/extending.md, in a training."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain import Result
from aitrain.options.algorithms import ALGORITHMS
from tests.environments.vowels import Vowels
from tests.training.conftest import rollouts

PAGE = Path(__file__).parents[2] / "docs/extending.md"


def test_an_algorithm_trains_on_the_advantages_that_its_class_returns(
    train: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(r"^```python file=best_of_group.py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    defined: dict[str, Any] = {}
    exec(found[1], defined)
    monkeypatch.setitem(ALGORITHMS, "dapo", defined["best"])

    result = train(Vowels(), rl_loss_type="dapo", max_steps=2, eval_cases=0)
    groups = defaultdict(list)
    for record in rollouts(result):
        groups[record["step"], record["group"]].append((record["score"], record["advantage"]))
    assert len(groups) > 2
    for group in groups.values():
        best = max(score for score, _ in group)
        assert [advantage for _, advantage in group] == [float(score == best) for score, _ in group]
