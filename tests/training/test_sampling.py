"""How answers are sampled: by the run's options only, with one meaning, with a seed for each row, like with like."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from aitrain.engines.hf import HFEngine, with_noise
from aitrain.engines.logprob_check import LogprobShift
from aitrain.engines.sampling import Sampling
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Decoding, GenerationRequest


@pytest.fixture(scope="module")
def model(small_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(small_model, padding_side="left")


# -- the distribution


def by_hand(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """The probabilities that the docstring of sampling.py describes, one token at a time."""
    weights = {token: math.exp(value / sampling.temperature) for token, value in enumerate(logits)}
    ordered = sorted(weights, key=lambda token: -weights[token])[: sampling.top_k or None]
    total, kept, mass = sum(weights[token] for token in ordered), [], 0.0
    for token in ordered:
        if mass < sampling.top_p * total:
            kept.append(token)
            mass += weights[token]
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(logits))]


SHAPES = [
    Sampling(),
    Sampling(top_k=9, top_p=0.8, temperature=0.7),
    Sampling(top_k=6, temperature=1.3),
]


# -- generate

LENGTH = 12


def seeded(prompt: list[int], seed: int) -> GenerationRequest:
    return GenerationRequest(prompt, 60, SampleSeed(seed), Decoding.SEEDED, index=-1)


def sample(
    model: Any, tokenizer: Any, rows: Sequence[GenerationRequest], sampling: Sampling = SHAPES[0], most: int = LENGTH
) -> list[list[int]]:
    """Answers of the engine, in one batch."""
    end = EndOfTurn([tokenizer.eos_token_id], sampling.stop, tokenizer)
    engine = HFEngine(model, tokenizer, sampling, end)
    return [completion.ids for completion in engine.sample(list(rows), sampling, most)]


@pytest.mark.parametrize("sampling", SHAPES, ids=str)
def test_generate_samples_from_that_distribution_whatever_the_padding_and_the_models_own_settings(
    model: Any, tokenizer: Any, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores that transformers draws from, of a padded row that is in the middle of its answer."""
    own = {"min_p": 0.5, "no_repeat_ngram_size": 1, "suppress_tokens": [5, 6], "repetition_penalty": 3.0,
           "typical_p": 0.5, "forced_eos_token_id": 1, "top_k": 3}  # fmt: skip
    monkeypatch.setattr(model, "generation_config", GenerationConfig(**own))
    prompts, drawn = [tokenizer("say 2: aab").input_ids, tokenizer("a longer prompt").input_ids], []
    monkeypatch.setattr(torch, "multinomial", lambda probabilities, **_: drawn.append(probabilities.clone()) or
                        probabilities.argmax(-1, keepdim=True))  # fmt: skip

    rows = [GenerationRequest(*each, SampleSeed(0), index=-1) for each in zip(prompts, [1, 1], strict=True)]
    sample(model, tokenizer, [replace(rows[0], begun=3), rows[1]], sampling, 1)
    logits = [model(torch.tensor([prompt])).logits[0, -1].float().tolist() for prompt in prompts]
    for row in range(2):
        assert drawn[0][row].tolist() == pytest.approx(by_hand(logits[row], sampling), abs=1e-5)
    assert model.generation_config.min_p == 0.5  # its own again
    assert "generate" not in vars(model)


# -- stop strings


def test_a_stop_string_is_found_when_its_last_token_comes_and_not_before(tokenizer: Any) -> None:
    stops = EndOfTurn([], ["</a>", "é!"], tokenizer)
    ids = tokenizer("x<b></a>y</a>", add_special_tokens=False).input_ids
    text = [tokenizer.decode(ids[: count + 1]) for count in range(len(ids))]
    hits = [count for count in range(len(ids)) if stops.is_reached(ids[: count + 1])]
    assert [text[count] for count in hits] == ["x<b></a>", "x<b></a>y</a>"]
    accented = tokenizer("caféé!", add_special_tokens=False).input_ids
    assert [stops.is_reached(accented[: count + 1]) for count in range(len(accented))][-1]
    assert not any(stops.is_reached(accented[:count]) for count in range(len(accented)))


STOPS = ["e", "a", "t", "0", "#", "i o"]


def test_an_answer_ends_with_its_stop_string_which_it_keeps(model: Any, tokenizer: Any) -> None:
    """And is at its end, not cut off."""
    sampling = Sampling(stop=tuple(STOPS))
    end, ended = EndOfTurn([tokenizer.eos_token_id], STOPS, tokenizer), 0
    rows = [seeded(tokenizer(f"say {number}:").input_ids, number) for number in range(12)]
    for ids in sample(model, tokenizer, rows, sampling, 60):
        text = re.sub(r"<\|\w+\|>", "x", tokenizer.decode(ids))
        assert not any(stop in text[:-1] for stop in STOPS if len(stop) == 1), text
        assert end.is_reached(ids) or not text.endswith(tuple(STOPS))
        ended += text.endswith(tuple(STOPS))
    assert ended > 3


# -- like with like


@pytest.mark.parametrize("sampling", SHAPES, ids=str)
def test_the_shift_makes_an_engines_log_probabilities_those_over_all_tokens(sampling: Sampling) -> None:
    """Random hidden states and a random head, with a softcap and a scale."""
    torch.manual_seed(2)
    head, hidden, tokens = torch.randn(12, 5), torch.randn(100, 5), torch.randint(12, (100,))
    settings = sampling.temperature, 1024, 30.0, 1.5, ("log_probs",)
    shifts, *_ = LogprobShift(sampling).apply(hidden, head, None, tokens, *settings)

    logits = 30 * torch.tanh(1.5 * (hidden @ head.T) / 30)
    p = (logits / sampling.temperature).softmax(-1)
    for place, token in enumerate(tokens.tolist()):
        if q := by_hand(logits[place].tolist(), sampling)[token]:
            assert shifts[place].item() == pytest.approx(math.log(p[place, token] / q), abs=1e-4)


# -- with a seed for each row

ROWS = [seeded(prompt, len(prompt)) for prompt in ([10, 20, 30], [40] * 9, [50, 60])]


def test_an_answer_in_two_pieces_is_the_same_as_in_one(model: Any, tokenizer: Any) -> None:
    (whole,) = sample(model, tokenizer, ROWS[:1])
    (first,) = sample(model, tokenizer, ROWS[:1], most=5)
    (second,) = sample(model, tokenizer, [ROWS[0].after(first)], most=LENGTH - 5)
    assert first + second == whole


def test_temperature_and_truncation_come_before_the_draw_and_the_global_generator_is_as_before(
    model: Any, tokenizer: Any
) -> None:
    torch.manual_seed(5)
    before, attributes = torch.get_rng_state(), set(vars(model))
    likeliest = sample(model, tokenizer, ROWS, Sampling().greedy)
    assert sample(model, tokenizer, ROWS, Sampling(top_k=1)) == likeliest
    assert sample(model, tokenizer, ROWS, Sampling(1e-4)) == likeliest
    assert sample(model, tokenizer, ROWS) != likeliest
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
    assert len({SampleSeed(5, position).request_seed for position in range(100)}) == 100
