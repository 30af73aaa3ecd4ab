"""Sampling with a seed for each row: the same tokens beside whatever other rows, and the right distribution."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aitrain.engines.batching import BatchRow
from aitrain.engines.hf import HFEngine, HFModel, with_noise
from aitrain.engines.sampling import Sampling
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.limits import EndOfTurn

LENGTH = 12


@pytest.fixture(scope="module")
def model(small_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(small_model).eval()


def sampled(
    model: Any, prompts: list[list[int]], seeds: list[SampleSeed], sampling: Sampling | None = None, most: int = LENGTH
) -> list[list[int]]:
    """What each prompt gets, in one batch."""
    sampling = sampling or Sampling()
    engine = HFEngine(HFModel(model, SimpleNamespace(pad_token_id=256)), sampling, EndOfTurn([]))  # type: ignore[arg-type]
    rows = [BatchRow(prompt, seed=seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    return [completion.ids for completion in engine.sample(rows, sampling, most)]


PROMPTS = [[10, 20, 30], [40] * 9, [50, 60], [10, 20, 30]]
DRAWS = [SampleSeed(1), SampleSeed(2), SampleSeed(3), SampleSeed(4)]


def test_a_row_is_the_same_alone_and_beside_any_others(model: Any) -> None:
    together = sampled(model, PROMPTS, DRAWS)
    assert together[::-1] == sampled(model, PROMPTS[::-1], DRAWS[::-1])
    assert together == [sampled(model, [prompt], [draw])[0] for prompt, draw in zip(PROMPTS, DRAWS, strict=True)]
    assert together[0] != together[3]
    assert sampled(model, PROMPTS[:1], [SampleSeed(9)])[0] != together[0]


def test_an_answer_in_two_pieces_is_the_same_as_in_one(model: Any) -> None:
    (whole,) = sampled(model, PROMPTS[:1], DRAWS[:1])
    (first,) = sampled(model, PROMPTS[:1], DRAWS[:1], most=5)
    (second,) = sampled(model, [PROMPTS[0] + first], [SampleSeed(1, 5)], most=LENGTH - 5)
    assert first + second == whole


def test_temperature_and_truncation_come_before_the_draw_and_the_global_generator_is_as_before(model: Any) -> None:
    torch.manual_seed(5)
    before, attributes = torch.get_rng_state(), set(vars(model))
    likeliest = sampled(model, PROMPTS, DRAWS, Sampling().greedy)
    assert sampled(model, PROMPTS, DRAWS, Sampling(top_k=1)) == likeliest
    assert sampled(model, PROMPTS, DRAWS, Sampling(1e-4)) == likeliest
    assert sampled(model, PROMPTS, DRAWS) != likeliest
    assert torch.equal(torch.get_rng_state(), before)
    assert set(vars(model)) == attributes


def test_tokens_come_with_their_probabilities_whatever_the_seeds_are() -> None:
    """20,000 rows with consecutive seeds, and 20,000 positions of one: within four standard errors."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -math.inf, 0.5])
    expected, count = logits.softmax(-1), 20_000

    def tokens(seeds: Iterable[SampleSeed], step: int = 0) -> torch.Tensor:
        return with_noise(logits.expand(count, -1), [seed.token_seed(step) for seed in seeds]).argmax(-1)

    first, following = (tokens(map(SampleSeed, range(count)), step) for step in range(2))
    by_position = tokens(SampleSeed(7, position) for position in range(count))
    errors = (expected * (1 - expected) / count).sqrt()
    for drawn in (first, following, by_position):
        shares = torch.bincount(drawn, minlength=len(logits)) / count
        assert ((shares - expected).abs() <= 4 * errors).all()


def test_tokens_of_a_seed_are_those_of_every_version() -> None:
    """Evals are resumed and compared with the tokens that earlier versions sampled."""
    seeds = [[SampleSeed(row).token_seed(step) for row in range(4)] for step in range(3)]
    steps = [with_noise(torch.zeros(4, 100), of_rows).argmax(-1).tolist() for of_rows in seeds]
    assert steps == [[47, 54, 14, 23], [74, 26, 23, 38], [17, 40, 13, 98]]
