"""Calls of generate from many threads: as if each of them were alone, in few generations."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

from aitrain.engines import proxy_batcher
from aitrain.engines.batching import BatchingEngine
from aitrain.engines.proxy_batcher import ProxyBatcher, offer_model
from aitrain.engines.sampling import Sampling
from aitrain.engines.server import VLLMServerEngine
from aitrain.environment.seeds import EpisodeSeeds, current_seeds
from aitrain.errors import RunFailed
from aitrain.execution import task
from aitrain.execution.deadline_pool import DeadlinePool
from aitrain.execution.task import Outcome
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, GenerationRequest
from tests.training.proxy_calls import run_with

PAD, END = 256, 258
Job = Callable[[], Any]


class Watched:
    """A batcher, and how many rows each real generation had."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.batcher = ProxyBatcher(model, SimpleNamespace(pad_token_id=PAD), **options)
        self.policy = self.batcher.policy
        self.alone = type(model).generate.__get__(model)
        self.rows: list[int] = []
        model.generate = self._generate

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        self.rows.append(len(args[0] if args else kwargs["input_ids"]))
        return self.alone(*args, **kwargs)

    def outcomes(self, jobs: Sequence[Job]) -> list[Outcome[Any]]:
        return run_with(DeadlinePool(len(jobs), timeout=60), self.batcher, jobs)

    def together(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        outcomes = self.outcomes([lambda call=call: self.policy.generate(**call) for call in calls])
        assert [outcome.failure for outcome in outcomes] == [None] * len(calls)
        return [outcome.value for outcome in outcomes]

    def assert_as_if_alone(self, calls: Sequence[dict[str, Any]], generations: int) -> None:
        for result, call in zip(self.together(calls), calls, strict=True):
            expected = self.alone(**call)
            assert result.dtype == expected.dtype
            assert result.tolist() == expected.tolist()
        assert len(self.rows) == generations


@pytest.fixture
def model(small_model: Path) -> LlamaForCausalLM:
    """The small model, with weights so large that what it says is certain, and depends on every token and its place."""
    model = AutoModelForCausalLM.from_pretrained(small_model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers" in name and weight.dim() == 2:
                weight.mul_(8)
    return model  # type: ignore[no-any-return]


@pytest.fixture
def watched(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A batcher that waits until everybody has come."""
    monkeypatch.setattr(proxy_batcher, "FIRST_WINDOW", 60.0)
    monkeypatch.setattr(proxy_batcher, "SHORTEST_WINDOW", 60.0)
    return Watched(model)


def prompt(*widths: int) -> torch.Tensor:
    """Rows of random bytes, those that are shorter than the widest padded on the left."""
    draws = torch.Generator().manual_seed(sum(widths))
    rows = [torch.randint(0, 250, (width,), generator=draws) for width in widths]
    return torch.stack([torch.cat([torch.full((max(widths) - len(row),), PAD), row]) for row in rows])


def masked(*widths: int, **rest: Any) -> dict[str, Any]:
    ids = prompt(*widths)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), **rest}


# -- the same as alone


def test_answers_that_end_early_are_cut_to_the_longest_of_the_same_caller(watched: Watched) -> None:
    calls = [masked(*widths, max_new_tokens=20) for widths in [(4, 6), (9,), (2, 30), (16, 3, 3)]]
    tokens = torch.cat([watched.alone(**call)[:, call["input_ids"].shape[1] + 1 : -1].flatten() for call in calls])
    end = int(tokens.mode().values)  # ends some of these calls early
    watched.model.generation_config.eos_token_id = [END, end]
    watched = Watched(watched.model)
    watched.assert_as_if_alone(calls, generations=2)  # the second one without those that have ended
    expected = [watched.alone(**call) for call in calls]
    assert len({ids.shape[1] - call["input_ids"].shape[1] for ids, call in zip(expected, calls, strict=True)}) > 1
    assert any(PAD in ids[:, -1].tolist() for ids in expected)


# -- who shares a batch


@pytest.mark.parametrize(
    "special",
    [
        {"no_repeat_ngram_size": 1},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(8)])},
    ],
    ids=lambda special: next(iter(special)),
)
def test_a_call_that_cannot_be_batched_or_has_other_arguments_runs_alone(
    watched: Watched, special: dict[str, Any]
) -> None:
    call = masked(5, max_new_tokens=6, **special)
    calls = [call, masked(9, max_new_tokens=6), call, masked(4, max_new_tokens=6), masked(4, max_new_tokens=5)]
    watched.assert_as_if_alone(calls, generations=4)
    assert sorted(watched.rows) == [1, 1, 1, 2]


def test_an_error_reaches_only_who_made_it(watched: Watched) -> None:
    calls = [masked(width, max_new_tokens=4) for width in range(2, 6)]
    calls[3]["input_ids"][0, 0] = 10_000  # no such token
    *others, wrong = watched.outcomes([lambda call=call: watched.policy.generate(**call) for call in calls])
    assert wrong.failure
    assert "IndexError" in wrong.failure.message
    assert [outcome.value.tolist() for outcome in others] == [watched.alone(**call).tolist() for call in calls[:3]]

    (unknown,) = watched.outcomes([lambda: watched.policy.generate(**calls[0], seed=3)])
    assert unknown.failure
    assert "model_kwargs" in unknown.failure.message  # transformers' own error


# -- when


def test_a_caller_that_comes_late_is_not_waited_for_longer_than_the_window(model: LlamaForCausalLM) -> None:
    watched = Watched(model)
    come = threading.Event()

    def early() -> Any:
        watched.policy.generate(**masked(5, max_new_tokens=4))
        come.set()

    outcomes = watched.outcomes([lambda: come.wait(20), early])
    assert [outcome.value for outcome in outcomes] == [True, None]


def test_the_models_time_is_not_the_environments(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, skipped = watched.alone, [0.0]

    def takes_long(**words: Any) -> Any:
        skipped[0] += 1000.0
        return alone(**words)

    monkeypatch.setattr(watched, "alone", takes_long)
    monkeypatch.setattr(task, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + skipped[0]))
    (outcome,) = watched.outcomes([lambda: watched.policy.generate(**masked(5, max_new_tokens=1))])
    assert outcome.seconds < 500


# -- how


def test_forward_calls_are_made_one_at_a_time_and_without_gradients(watched: Watched) -> None:
    ids, threads = prompt(6), []
    watched.model.model.register_forward_hook(lambda *_: threads.append(threading.get_ident()))
    outcomes = watched.outcomes([lambda: watched.policy(ids)] * 3)
    assert threads == [threading.get_ident()] * 3
    for outcome in outcomes:
        assert not outcome.value.logits.requires_grad
        assert torch.equal(outcome.value.logits, watched.model(ids).logits)


# -- seeds of episodes


def test_what_an_episode_samples_depends_on_its_seed_and_on_no_other_episode(watched: Watched) -> None:
    """Each of its calls samples something else."""
    calls = [masked(*widths, max_new_tokens=8, do_sample=True, num_return_sequences=2) for widths in [(4, 6), (9,)]]

    def twice(seed: int, call: dict[str, Any]) -> list[Any]:
        current_seeds.set(EpisodeSeeds(seed))
        return [watched.policy.generate(**call).tolist() for _ in range(2)]

    jobs: list[Job] = [partial(twice, seed, call) for seed, call in enumerate(calls)]
    together = [outcome.value for outcome in watched.outcomes(jobs)]
    assert together == [outcome.value for outcome in watched.outcomes(jobs[::-1])][::-1]
    assert together == [watched.outcomes([job])[0].value for job in jobs]
    assert watched.rows == [6] * 4 + [4, 4, 2, 2]
    assert len({tuple(row) for rows in together[0] for row in rows}) == 8


# -- an engine


class Parrot(BatchingEngine):
    """An engine that answers with the prompt backwards, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(EndOfTurn([END]))
        self.asked: list[tuple[list[GenerationRequest], Sampling, int]] = []

    def sample(self, rows: list[GenerationRequest], sampling: Sampling, max_tokens: int) -> list[Completion]:
        self.asked.append((rows, sampling, max_tokens))
        return [Completion(row.prompt_ids[::-1][:max_tokens]) for row in rows]


@pytest.fixture
def parrot(watched: Watched) -> tuple[Parrot, Watched]:
    parrot = Parrot()
    return parrot, Watched(watched.model, engine=parrot)


def test_an_engine_gets_prompts_without_padding_and_its_answers_are_padded(parrot: tuple[Parrot, Watched]) -> None:
    engine, watched = parrot
    calls = [masked(*widths, max_new_tokens=8, do_sample=False) for widths in [(3, 5), (12,)]]
    two, one = watched.together(calls)
    assert watched.rows == []
    first, second = calls[0]["input_ids"].tolist()
    asked = [first[2:], second, calls[1]["input_ids"][0].tolist()]
    assert sorted(row.prompt_ids for row in engine.asked[0][0]) == sorted(asked)
    assert two.tolist() == [first + first[2:][::-1] + [PAD] * 2, second + second[::-1]]
    assert one.tolist() == [asked[2] + asked[2][::-1][:8]]


def test_an_engine_is_told_how_to_sample(parrot: tuple[Parrot, Watched]) -> None:
    engine, watched = parrot
    watched.together([masked(3, max_new_tokens=4, do_sample=False, temperature=0.7)])
    sampled = {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2}
    watched.together([masked(3, max_new_tokens=6, **sampled)])
    assert [(len({row.seed for row in rows}), limit, sampling) for rows, sampling, limit in engine.asked] == [
        (1, 4, Sampling(temperature=0.0)),
        (2, 6, Sampling(temperature=1.0, top_k=50, top_p=0.9)),
    ]


@pytest.mark.parametrize("unknown", [{"eos_token_id": 7}, {"repetition_penalty": 1.2}], ids=str)
def test_what_an_engine_cannot_do_the_model_does(parrot: tuple[Parrot, Watched], unknown: dict[str, Any]) -> None:
    engine, watched = parrot
    watched.assert_as_if_alone([masked(3, max_new_tokens=4, pad_token_id=PAD, **unknown)], generations=1)
    assert engine.asked == []


def test_a_server_gets_each_call_by_itself_and_fails_it_alone(watched: Watched) -> None:
    """A server batches them itself: none waits for another one."""
    in_flight = 0

    class Server(VLLMServerEngine):
        def __init__(self) -> None: ...

        async def complete(self, rows: list[GenerationRequest], sampling: Sampling) -> list[Completion]:
            nonlocal in_flight
            in_flight += 1
            while in_flight < 4:
                await asyncio.sleep(0.001)
            if len(rows) > 1:
                raise RunFailed("the server is gone")
            return [Completion(rows[0].prompt_ids)]

    watched = Watched(watched.model, engine=Server())
    prompts = [prompt(4), prompt(5), prompt(6), prompt(4, 4)]
    outcomes = watched.outcomes([lambda ids=ids: watched.policy.generate(ids, max_new_tokens=2) for ids in prompts])
    assert [outcome.value.tolist() for outcome in outcomes[:3]] == [ids.repeat(1, 2).tolist() for ids in prompts[:3]]
    assert "the server is gone" in str(outcomes[3].failure)


def test_calls_of_an_environment_use_the_gpu_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    part: Any = SimpleNamespace(offer=lambda *_: None)
    runner: Any = SimpleNamespace(parts={"": part}, config=SimpleNamespace(share_prefixes=True))
    model: Any = SimpleNamespace(device=torch.device("cuda:1"))
    offer_model(runner, model, None, refusal="sharded")
    with part.around():
        assert used == [model.device]
