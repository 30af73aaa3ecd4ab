"""What a real run writes: records with all that an episode was, metrics lines, and the environment's source."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from aitrain import Result
from aitrain.runs.environment_source import read_source
from aitrain.runs.metrics_line import read_metrics
from aitrain.runs.rollout_record import read_rollouts
from aitrain.runs.run_folder import RunFolder
from tests.environments import dictionary_lookup
from tests.environments.dictionary_lookup import WORDS, DictionaryLookup


def test_a_run_records_all_that_an_episode_was_its_metrics_and_the_source_of_its_environment(
    train: Callable[..., Result],
) -> None:
    options = {"rl_prompts_per_step": 2, "rl_num_generations": 2, "batch_size": 4, "rl_max_turns": 3, "eval_cases": 2}
    run = RunFolder(train(DictionaryLookup(), max_steps=2, eval_strategy="steps", eval_steps=1, **options).folder)
    played = list(read_rollouts(run.rollouts / "rank0.jsonl"))
    for record in played:
        assert record.row_number is not None
        word = list(WORDS)[record.row_number]
        assert record.row == {"word": word, "kind": WORDS[word]}
        assert record.messages[0] == {"role": "user", "content": f"What is a {word}?"}
        assert sum(turn.tokens or 0 for turn in record.turns) == record.tokens > 0
        assert {turn.weight_version for turn in record.turns} == {record.weight_version}
    assert {(bool(record.eval_phase), record.step, record.weight_version) for record in played} == {
        (True, 0, 0), (False, 1, 0), (True, 1, 1), (False, 2, 1), (True, 2, 2),
    }  # fmt: skip

    lines = list(read_metrics(run.metrics))
    assert sorted((line.step, line.is_scoring) for line in lines) == [(1, False), (1, True), (2, False)]
    assert any("env/tries" in line.values for line in lines if not line.is_scoring)
    (file,) = read_source(run.environment_source)
    assert file == {"name": "dictionary_lookup.py", "text": inspect.getsource(dictionary_lookup)}
