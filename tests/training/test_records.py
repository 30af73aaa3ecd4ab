"""What a real run writes: records with all that an episode was, metrics lines, and the environment's source."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

from aitrain import Result
from aitrain.runs.environment_source import read_source
from aitrain.runs.metrics_line import SCHEMA as METRICS_SCHEMA
from aitrain.runs.metrics_line import read_metrics
from aitrain.runs.rollout_record import SCHEMA, RolloutRecord, read_rollouts
from aitrain.runs.run_folder import RunFolder, read_lines
from tests.environments import dictionary_lookup
from tests.environments.dictionary_lookup import WORDS, DictionaryLookup


def records(file: Path) -> list[RolloutRecord]:
    return list(read_rollouts(file))


def test_a_run_records_all_that_an_episode_was_its_metrics_and_the_source_of_its_environment(
    train: Callable[..., Result],
) -> None:
    options = {"rl_prompts_per_step": 2, "rl_num_generations": 2, "batch_size": 4, "rl_max_turns": 3, "eval_cases": 2}
    run = RunFolder(train(DictionaryLookup(), max_steps=2, eval_strategy="steps", eval_steps=1, **options).folder)
    played = records(run.rollouts / "rank0.jsonl")
    assert {record.schema for record in played} == {SCHEMA}
    for record in played:
        assert record.row_number is not None
        word = list(WORDS)[record.row_number]
        assert record.row == {"word": word, "kind": WORDS[word]}
        assert [tool["function"]["name"] for tool in record.tools] == ["look_up"]  # type: ignore[index]
        assert record.messages[0] == {"role": "user", "content": f"What is a {word}?"}
        assert sum(turn.tokens or 0 for turn in record.turns) == record.tokens > 0
        assert {turn.weight_version for turn in record.turns} == {record.weight_version}
        said = [message for message in record.transcript()[1] if message.role == "assistant"]
        assert len(record.turns) == len(said) - 1  # the first of them is the environment's example

    trained = [record for record in played if not record.eval_phase]
    assert {(record.step, record.weight_version) for record in trained} == {(1, 0), (2, 1)}
    assert all(record.group is not None and record.advantage is not None for record in trained)
    scored = [record for record in played if record.eval_phase]
    assert {record.weight_version for record in scored} == {0, 1, 2}
    assert all(record.sample == 0 and record.group is None for record in scored)

    assert all(line["schema"] == METRICS_SCHEMA for line in read_lines(run.metrics))
    lines = list(read_metrics(run.metrics))
    assert sorted((line.step, line.is_scoring) for line in lines) == [(1, False), (1, True), (2, False)]
    assert any("env/tries" in line.values for line in lines if not line.is_scoring)

    (file,) = read_source(run.environment_source)
    assert file == {"name": "dictionary_lookup.py", "text": inspect.getsource(dictionary_lookup)}
