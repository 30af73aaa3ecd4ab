"""What is misspelt is answered with the nearest name."""

from __future__ import annotations

import pytest

from aitrain.environment.contract import check_methods
from aitrain.errors import EnvironmentFailed
from aitrain.execution.user_code import failure_message


class Misspelt:
    def build_datasets(self) -> list[dict[str, str]]:
        return []

    def score_epsiode(self, completion: str) -> float:
        return 0.0


def test_a_misspelt_method_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match=r"It has build_datasets\. Did you mean build_dataset\?"):
        check_methods(Misspelt())
    misspelt = type("Env", (Misspelt,), {"build_dataset": Misspelt.build_datasets})
    with pytest.raises(EnvironmentFailed, match=r"to 1\. It has score_epsiode\. Did you mean score_episode\?"):
        check_methods(misspelt())


def test_a_misspelt_name_of_the_users_code_is_answered_with_the_nearest() -> None:
    def advice(code: str) -> str:
        with pytest.raises((NameError, AttributeError)) as caught:
            exec(f"def score(answer):\n    return {code}\nscore('x')", {})
        return failure_message("score_episode raised", caught.value).splitlines()[-1]

    assert advice("anwser") == "Did you mean answer?"
    assert advice("sroted(answer)") == "Did you mean sorted?"
    assert advice("answer.stirp()") == "Did you mean strip?"
    assert "Did you mean" not in advice("nothing_like_it")
