"""Models: positions from a table, dropout, quantized bases; those that are loaded to be played, with their adapter and
their tokenizer."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    PreTrainedModel,
)

from aitrain import TrainConfig
from aitrain.batch import PassLimit
from aitrain.errors import ConfigError
from aitrain.runs.model_reference import read_model
from aitrain.training import model
from aitrain.training.loaded_policy import load_policy
from aitrain.training.model import load_model, load_tokenizer
from aitrain.training.trainer import EpisodeTrainer
from tests.conftest import write
from tests.environments.vowels import Vowels
from tests.training.conftest import Train, save_adapter

CONTEXT = 64


NOISE = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}


@pytest.fixture
def gpt2(small_model: Path, tmp_path: Path) -> Path:
    """A folder with a model that has a table of positions, as far apart as in trained models, and dropout."""
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1,
        pad_token_id=0, **NOISE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.transformer.wpe.weight.data.normal_()
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[EpisodeTrainer]:
    """The trainers that a test's runs make."""
    made: list[EpisodeTrainer] = []
    make = EpisodeTrainer.__init__

    def noted(self: EpisodeTrainer, *arguments: Any) -> None:
        made.append(self)
        make(self, *arguments)

    monkeypatch.setattr(EpisodeTrainer, "__init__", noted)
    return made


# -- positions and dropout


def test_a_rows_log_probabilities_are_those_that_it_has_without_padding(
    gpt2: Path, train: Train, trainers: list[EpisodeTrainer]
) -> None:
    """Padded on both sides, and to more columns than the model has positions; without the dropout of the base, which
    stays in the saved configuration."""
    result = train(Vowels(4), model=str(gpt2), max_steps=1, eval_cases=0, rl_num_generations=2, rl_kl_coef=0.1)
    assert abs(result.history[0]["kl"]) < 1e-6
    config = AutoModelForCausalLM.from_pretrained(result.model).config
    assert {name: getattr(config, name) for name in NOISE} == NOISE
    trainer = trainers[0]
    trainer.model.eval()

    def log_probs(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            values = [trainer._get_per_token_logps_and_entropies(m, ids, mask, 6)[0] for m in models]
        return torch.cat(values)

    models = (trainer.model, trainer.ref_model)
    row = torch.arange(5, 17)[None]
    for left, right in ((5, 0), (0, 3), (20, 3), (CONTEXT, 0)):
        pads = (left, right)
        padded, mask = (torch.nn.functional.pad(x, pads) for x in (row, torch.ones_like(row)))
        wide = log_probs(padded, mask)[:, : 6 - right]
        assert (wide - log_probs(row, torch.ones_like(row))[:, right:]).abs().max() < 1e-5, pads


def test_a_model_whose_positions_depend_on_padding_computes_a_generation_batch_in_passes(
    gpt2: Path, train: Train, trainers: list[EpisodeTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(Vowels(4), model=str(gpt2), max_steps=1, eval_cases=0, rl_trim_padding=False)
    trainer, sizes = trainers[0], list[int]()
    monkeypatch.setattr(trainer, "pass_limit", PassLimit(2))
    trainer.model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    ids = torch.arange(5, 17).repeat(5, 1)
    with torch.no_grad():
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 6, batch_size=5)
    assert sizes == [2, 2, 1]


def test_a_mixture_of_experts_without_rotary_positions_has_the_loss_of_its_router(
    small_model: Path, tmp_path: Path, train: Train
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    config = JambaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, expert_layer_period=2, expert_layer_offset=1,
        attn_layer_period=1, attn_layer_offset=0, use_mamba_kernels=False, pad_token_id=0,
    )  # fmt: skip
    for each in (JambaForCausalLM(config), tokenizer):
        each.save_pretrained(tmp_path / "jamba")
    result = train(Vowels(4), model=str(tmp_path / "jamba"), max_steps=1, eval_cases=0)
    assert result.history[0]["aux_loss"] > 0


# -- precision


def quantized(config: TrainConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Stands in for bitsandbytes, which needs a GPU: bfloat16, and says that it is loaded in 4 bits."""
    model = load_model(config, torch.bfloat16)
    model.is_loaded_in_4bit = True
    return model


def test_an_adapter_on_a_quantized_base_trains_in_float32(
    train: Train, trainers: list[EpisodeTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam moves each weight by up to 1e-5 a step, which is too little for bfloat16."""
    monkeypatch.setattr("aitrain.training.preparation.load_model", quantized)
    result = train(Vowels(), peft=True, max_steps=1, eval_cases=0, merge_adapter=False)
    assert not (result.model / "merged").exists()
    adapter = [p for p in trainers[0].model.parameters() if p.requires_grad]
    assert {p.dtype for p in adapter} == {torch.float32}


# -- models that are loaded to be played


def test_an_adapter_is_played_on_its_base_with_its_own_tokenizer(small_model: Path, tmp_path: Path) -> None:
    adapted = save_adapter(small_model, tmp_path)
    write(tmp_path, {"chat_template.jinja": "of the adapter"})
    policy, base = (load_policy(read_model(str(folder)), TrainConfig()) for folder in (tmp_path, small_model))
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(policy.model(ids).logits, adapted(ids).logits)
    assert not torch.allclose(base.model(ids).logits, adapted(ids).logits)
    assert policy.tokenizer.chat_template == "of the adapter"
    assert not policy.model.training


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """A Hub that takes connections and never answers; called at the end, it returns how many there were."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(model, "HUB_SECONDS", 0.1)
        server.setblocking(False)

        def connections() -> int:
            with suppress(BlockingIOError):
                server.accept()[0].close()
                return 1 + connections()
            return 0

        yield connections


def test_a_hub_that_never_answers_is_asked_once(silent_hub: Callable[[], int]) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="couldn't connect to"):
            load_tokenizer(TrainConfig(model="nosuch"))
    assert silent_hub() == 1


def test_a_model_in_the_cache_is_loaded_though_the_hub_never_answers_and_an_adapter_there_is_no_model_to_train(
    silent_hub: Callable[[], int], train: Train, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--some--model"
    shutil.copytree(small_model, cached / "snapshots" / "abc")
    write(cached, {"refs/main": "abc"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    policy = load_policy(read_model("some/model"), TrainConfig())
    assert policy.config.model == "some/model"
    assert silent_hub() == 1
    assert not constants.HF_HUB_OFFLINE
    save_adapter(small_model, cached / "snapshots" / "abc")
    for _ in range(2):
        with pytest.raises(ConfigError, match="some/model is an adapter"):
            train(Vowels(), model="some/model")
        (cached / "snapshots" / "abc" / "config.json").unlink(missing_ok=True)


def test_a_damaged_adapter_is_named(small_model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    save_adapter(small_model, adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"cannot load the adapter .*adapter:"):
        load_policy(read_model(str(adapter)), TrainConfig())
