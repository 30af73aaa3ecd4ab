"""Prompts that are computed once: log-probabilities, gradients and greedy tokens are those of rows apart."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconH1Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)
from trl.trainer.utils import add_fused_lm_head

from aitrain.batch import PassLimit
from aitrain.engines import hf, shared_cache
from aitrain.engines.hf import HFEngine
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import use_autocast
from aitrain.engines.shared_cache import AutocastCache
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Decoding, GenerationRequest
from aitrain.training.passes import plan_blocks
from aitrain.training.shared_prompts import SharedPrompts, why_apart

SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LAYERS = ["sliding_attention", "full_attention"]
SHARING = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8, layer_types=LAYERS),
    "mistral": MistralConfig(**SMALL, sliding_window=8),
    "wide window": MistralConfig(**SMALL, sliding_window=128),
    "gpt2": GPT2Config(**GPT2, **NO_DROPOUT),
    "mixture of experts": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}
APART = {
    "dropout": GPT2Config(**GPT2),
    "longer rows rotate": LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}
    ),
    "state space": MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=1),
    "hybrid": FalconH1Config(
        **SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=16
    ),
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # else all answers are alike
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


# -- training


@pytest.mark.parametrize("kind", [*SHARING, *APART])
@pytest.mark.parametrize("precise", [True, False], ids=["float32", "bfloat16"])
def test_models_share_prompts_if_their_cache_is_of_keys_and_values(kind: str, precise: bool) -> None:
    model = model_of((SHARING | APART)[kind])
    with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
        assert (why_apart(model, precise) == "") == (kind in SHARING)
    assert all(parameter.grad is None for parameter in model.parameters())


def rows_of(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids and mask of padded rows, as TRL pads them, and the width of the answers."""
    before, after = max(map(len, prompts)), max(1, *map(len, answers))
    pairs = list(zip(prompts, answers, strict=True))
    ids = [[0] * (before - len(one)) + one + two + [0] * (after - len(two)) for one, two in pairs]
    rows = torch.tensor(ids)
    return rows, (rows != 0).long(), after


tokens = st.integers(3, 5)  # so few that many rows are equal, or begin like another one
answers_of_group = st.lists(st.lists(tokens, max_size=7), min_size=1, max_size=5)
groups = st.lists(st.tuples(st.lists(tokens, min_size=2, max_size=12), answers_of_group), min_size=1, max_size=4)
"""Prompts with their answers, some empty; two groups may have the same prompt."""
switches = st.booleans()


@settings(max_examples=25, deadline=None)
@given(groups, st.integers(1, 6), st.sampled_from(["llama", "gemma3"]), switches, switches, st.integers(0, 99))
def test_gradients_of_any_groups_are_those_of_rows_apart(
    groups: list[tuple[list[int], list[list[int]]]], most: int, kind: str, joins: bool, checkpoints: bool, seed: int
) -> None:
    prompts = [prompt for prompt, answers in groups for _ in answers]
    answers = [answer for _, answers in groups for answer in answers]
    lengths = list(map(len, prompts)), list(map(len, answers))
    torch.manual_seed(seed)
    weights = torch.rand(len(prompts), max(1, *lengths[1])).mul(2).round() * (torch.rand(len(prompts), 1) < 0.8)
    in_loss = weights.any(1).nonzero().flatten().tolist() or [0]  # not the unscored rows; of others not all tokens
    model, apart = (model_of(SHARING[kind]).train().double() for _ in range(2))
    if checkpoints:
        model.gradient_checkpointing_enable()

    numbers = [prompts.index(prompt) for prompt in prompts]
    blocks = plan_blocks(in_loss, numbers, *lengths, PassLimit(most), 1, most=10**9)
    assert blocks is not None
    for block in blocks[0]:
        shown = [row for rows in block for row in rows]
        ids, mask, width = rows_of([prompts[row] for row in shown], [answers[row] for row in shown])
        labels = ids.masked_fill(mask == 0, -100)
        expected = apart(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -width:]
        (expected * weights[shown, :width]).sum().backward()
        shared = SharedPrompts(model, ids[:, :-width], mask[:, :-width])
        for number, rows in enumerate(block):
            places = [shown.index(row) for row in rows]
            shared.is_joined = joins and number == len(block) - 1
            of_loss = weights[rows, :width]
            in_loss_of_pass = (of_loss > 0) & mask[places, -width:].bool()
            logps, _ = shared.log_probs(model, ids[places], mask[places], in_loss_of_pass)
            (logps * of_loss).sum().backward()
            # of equal padding: it moves float32 positions
            assert (logps - expected[places] * in_loss_of_pass).abs().max() < 1e-6
        if not joins:
            shared.backward()

    gradients = [(ours.grad, theirs.grad) for ours, theirs in zip(model.parameters(), apart.parameters(), strict=True)]
    largest = max(theirs.norm() for _, theirs in gradients)
    for ours, theirs in gradients:
        assert (ours - theirs).norm() <= 1e-5 * largest + 1e-6


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=30),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_each_row_is_in_one_pass_and_all_processes_have_equally_many(
    rows: list[tuple[int, int]], most: int, processes: int
) -> None:
    prompts, completions = [number for number, _ in rows], [length for _, length in rows]
    of_prompts = [20 + 7 * number for number in prompts]
    shares = plan_blocks(list(range(len(rows))), prompts, of_prompts, completions, PassLimit(most), processes, 10**9)
    if shares is None:
        assert processes > 1, "there may be too few rows for all"
        return
    passes = [one for share in shares for block in share for one in block]
    assert sorted(row for one in passes for row in one) == list(range(len(rows)))
    assert len({tuple(map(len, share)) for share in shares}) == 1, "FSDP2 gathers the weights for all at once"
    assert max(map(len, passes)) <= most
    for block in (block for share in shares for block in share):
        assert len(block) == 1 or len({prompts[row] for one in block for row in one}) == 1


# -- generation


async def play(engine: HFEngine, prompts: list[list[int]], episodes: Sequence[int], how: Decoding) -> list[Any]:
    """The answers in episodes of one to three turns; four episodes have one prompt. Some rewrite their beginning."""

    async def episode(number: int, leave: Any) -> list[list[int]]:
        ids, answers = [*prompts[number // 4]], list[list[int]]()
        for turn in range(1 + number % 3):
            request = GenerationRequest([*ids], 12, SampleSeed(10 * number + turn), how, number)
            answers.append((await engine.generate(request)).ids)
            ids += answers[-1] + [7 + number] * (1 + (number + turn) % 4)
            ids[1 if number % 5 == 4 else 0] += turn
        leave()
        return answers

    async with engine.batch(len(episodes)) as leave:
        return await asyncio.gather(*(episode(number, leave) for number in episodes))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was shared in the generations of a test."""
    found = list[str]()

    def noted(name: str) -> Any:
        function = getattr(shared_cache, name)

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if getattr(result, "cache", result) is not None:
                found.append(name)
            return result

        return call

    monkeypatch.setattr(shared_cache, "LEAST_SAVED", 0)
    for name in (ONCE, KEPT, CUT):
        monkeypatch.setattr(hf, name, noted(name))
    return found


ONCE, KEPT, CUT = "cache_of_prompts", "cache_of_kept", "with_running_rows"
PLAIN, SHAPED = Sampling(), Sampling(0.7, top_k=9)


@pytest.mark.parametrize(
    ("kind", "sampling", "short_of", "shared"),
    [
        *(
            (kind, PLAIN, "", {ONCE, CUT} | ({KEPT} if SHARING[kind].to_dict().get("sliding_window") != 8 else set()))
            for kind in SHARING
        ),
        ("llama", SHAPED, "", {ONCE, KEPT, CUT}),
        ("llama", PLAIN, "memory", {ONCE, CUT}),
        ("llama", PLAIN, "ranks", set()),
        *((kind, PLAIN, "", set()) for kind in APART if kind != "dropout"),
    ],
)
def test_tokens_of_all_turns_are_those_of_each_episode_alone(
    kind: str, sampling: Sampling, short_of: str, shared: set[str], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy or with seeds. Prompts are computed once, turns continue, and rows that have ended leave."""
    model = model_of((SHARING | APART)[kind]).eval()
    prompts = [[3 + number * 20 + place for place in range(4 + 5 * number)] for number in range(3)]
    how = Decoding.GREEDY if sampling == PLAIN else Decoding.SEEDED
    if short_of == "memory":
        monkeypatch.setattr(shared_cache, "free_memory", lambda: 1000)

    def engine(shares: bool) -> HFEngine:
        tokenizer: Any = SimpleNamespace(pad_token_id=0)
        shared_by = Accelerator(cpu=True) if short_of == "ranks" else None
        made = HFEngine(model, tokenizer, sampling, EndOfTurn(range(1, 300, 9)), 200, shared_by)
        made.shares_prompts = shares
        return made

    together = asyncio.run(play(engine(True), prompts, range(12), how))
    assert set(calls) == shared
    for number in (2, 4, 8, 9):
        assert [together[number]] == asyncio.run(play(engine(False), prompts, [number], how))
    assert len({len(answer) for answers in together for answer in answers}) > 3


@pytest.mark.parametrize("kind", SHARING)
def test_keys_that_are_kept_in_the_format_of_autocast_give_the_same_logits(kind: str) -> None:
    model, ids = model_of(SHARING[kind]).eval(), torch.arange(3, 30).view(3, 9)
    use_autocast(Mock(autocast=lambda: torch.autocast("cpu", torch.bfloat16)), model)
    pickle.dumps(model)
    how: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "output_logits": True}
    ours, theirs = (
        model.generate(ids, past_key_values=cache(config=model.config), return_dict_in_generate=True, **how)
        for cache in (AutocastCache, DynamicCache)
    )
    assert ours.past_key_values.layers[0].keys.dtype == torch.bfloat16
    assert all(map(torch.equal, ours.logits, theirs.logits))
