"""Episodes of several turns on the real trainer: every sampled token is trained, and nothing else is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from aitrain import ConfigError, TrainConfig
from aitrain.engines.hf import HFEngine
from aitrain.rollout.engine import Completion
from aitrain.training.chat_templates import chat_format
from aitrain.training.model import load_tokenizer
from aitrain.training.trainer import EpisodeTrainer
from aitrain.training.training_batch import episode_metrics, episode_record
from tests.finished_runs import FinishedRuns, Talk, Vault
from tests.training.conftest import Train, rollouts
from tests.training.scripted_policy import played

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FORGETFUL = "forgetful.jinja"
Speaks = Callable[[str], Any]


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """What training samples, one list for each turn of a batch."""
    rounds: list[list[list[int]]] = []
    sample = HFEngine.sample

    def watch(self: HFEngine, *arguments: Any) -> list[Completion]:
        completions = sample(self, *arguments)
        if self.model.training:
            rounds.append([completion.ids for completion in completions])
        return completions

    monkeypatch.setattr(HFEngine, "sample", watch)
    return rounds


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """What the loss is made of."""
    outputs: list[dict[str, torch.Tensor]] = []
    score = EpisodeTrainer._generate_and_score_completions
    monkeypatch.setattr(
        EpisodeTrainer, "_generate_and_score_completions", lambda *given: outputs.append(score(*given)) or outputs[-1]
    )
    return outputs


# -- what is in the loss


@pytest.mark.parametrize("chat", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["chat", "strings"])
def test_every_sampled_token_is_in_the_loss_and_no_other(
    chat: bool, train: Train, sampled: list[list[list[int]]], batches: list[dict[str, torch.Tensor]]
) -> None:
    result = train(Talk(chat), rl_prompts_per_step=2, batch_size=4)

    for number, batch in enumerate(batches):
        in_loss = (batch["completion_mask"] * batch["tool_mask"]).bool()
        rounds = sampled[3 * number : 3 * number + 3]
        for row, answers in enumerate(zip(*rounds, strict=True)):
            assert batch["completion_ids"][row][in_loss[row]].tolist() == list(chain(*answers))
        assert in_loss.sum() == sum(map(len, chain(*rounds)))
        items = batch["num_items_in_batch"] * batch["kept"].sum()
        assert items == pytest.approx(float(in_loss[batch["kept"]].sum()))
        assert (batch["completion_mask"].bool() & ~in_loss).any()
    assert sum(record["tokens"] for record in rollouts(result)) == sum(map(len, chain(*sampled)))
    assert {len(record["turns"]) for record in rollouts(result)} == {3}


# -- templates


@pytest.fixture
def speaks(small_model: Path) -> Speaks:
    """`speaks("gemma")`: the small model's tokenizer, with a chat template that TRL ships."""

    def tokenizer_with(name: str) -> Any:
        template = str(TEMPLATES / f"{name}.jinja")
        tokenizer = load_tokenizer(TrainConfig(model=str(small_model), chat_template=template))
        tokenizer.bos_token = "<|endoftext|>"
        return tokenizer

    return tokenizer_with


@pytest.mark.parametrize("ends", ["<|im_end|>", ""], ids=["ended", "cut"])
@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3_instruct_2507", "llama3", "llama3_1", "gemma", "gemma3", "cohere", "phi3", "lfm2"]
)
def test_an_episode_is_written_as_its_chat_template_writes_it(speaks: Speaks, name: str, ends: str) -> None:
    tokenizer = speaks(name)
    episode, _ = played(Talk(), tokenizer, lambda given: f"answer {given.count('more')}{ends}", "user")
    messages, trajectory = episode_record(episode, 1, 0).messages, episode.trajectory

    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["answer 0", "answer 1", "answer 2"]
    sampled = [token for token, is_sampled in zip(trajectory.ids, trajectory.mask, strict=True) if is_sampled]
    assert tokenizer.decode(sampled) == "".join(f"answer {turn}{ends}" for turn in range(3))
    # the scripted model ends its answers with its own end token, whatever the template's is
    written = tokenizer.decode(trajectory.prompt_ids + trajectory.ids)
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    expected = expected[: expected.rindex("answer 2") + len("answer 2")]
    assert written.replace(ends, "") == expected.replace(ends, "")


@pytest.mark.slow
def test_a_template_that_is_not_prefix_preserving_is_swapped_for_the_one_for_training(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    template = TEMPLATES / "qwen3.jinja"
    result = train(Talk(), max_steps=1, eval_cases=0, chat_template=str(template))

    assert "TRL's training template is used" in capsys.readouterr().err
    assert (result.folder / "model" / "chat_template.jinja").read_text() == template.read_text()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("42<|im_end|>", "42"),
        ("42<|endoftext|><|endoftext|>", "42<|endoftext|><|endoftext|>"),
        ("4<|im_start|>2<|im_end|>", "4<|im_start|>2"),
        ("<|im_start|><|im_end|>", "<|im_start|>"),
        ("4<|im_end|><|im_end|>", "4<|im_end|>"),
        ("<|im_end|>", ""),
    ],
)
def test_only_what_ended_an_answer_is_stripped(written: str, read: str) -> None:
    """Special tokens that the model writes inside an answer are part of it."""
    tokenizer = load_tokenizer(TrainConfig(model="tiny"))
    chat = chat_format(tokenizer, TrainConfig())
    turn = chat.read(tokenizer(written)["input_ids"], [], (), [tokenizer.eos_token_id])
    assert turn.text == read


# -- what is refused before a training


@pytest.mark.parametrize(
    ("environment", "options", "why"),
    [
        (Talk(), {"rl_max_episode_tokens": 3000}, "rl_max_episode_tokens: 3000 new tokens leave no room"),
        (Vault(chat=False), {}, "prompts that are strings"),
        (Vault(), {"chat_template": "chatml"}, "cannot write calls and results"),
        (Talk(), {"chat_template": FORGETFUL}, "is not prefix-preserving"),
    ],
)
def test_what_cannot_be_played_is_refused(
    environment: Any, options: dict[str, Any], why: str, train: Train, here: Path
) -> None:
    (here / FORGETFUL).write_text(
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}[{{ m.role }}]{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(ConfigError, match=why):
        train(environment, **options)


# -- seeds


def test_the_seed_is_one_for_a_group_and_another_for_each_group_and_step(finished: FinishedRuns) -> None:
    """Where a batch is trained on twice, its second step is made with what the policy sampled before the first one."""
    result = finished("talk")
    played = {(record["step"], record["group"], record["seed"]) for record in rollouts(result)}
    assert len(played) == len({seed for *_, seed in played}) == 4

    versions = {(record["step"], record["weight_version"]) for record in rollouts(result)}
    assert versions == {(1, 0), (3, 2)}
    before, after = rollouts(result, "before_sampled"), rollouts(result, "after_sampled")
    assert [record["seed"] for record in before] == [record["seed"] for record in after]
    assert {len(record["turns"]) for record in [*before, *after]} == {3}
    assert {record["weight_version"] for record in after} == {4}


# -- tools


QWEN = '<tool_call>\n{"name": "open", "arguments": {"code": 100}}\n</tool_call>'
LLAMA = '{"name": "open", "parameters": {"code": 100}}<|eot_id|>'
QWEN_3_6 = (
    "100, I think.\n</think>\n\n"
    "<tool_call>\n<function=open>\n<parameter=code>\n100\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("name", "call"), [("qwen2_5", QWEN), ("qwen3", QWEN), ("llama3_1", LLAMA), ("qwen3_6", QWEN_3_6)]
)
def test_calls_are_read_as_the_models_own_template_writes_them(speaks: Speaks, name: str, call: str) -> None:
    def answer(given: str) -> str:
        assert "open" in given
        return "no more" if re.search(r"calls\W+1", given) else call

    episode, _ = played(Vault(), speaks(name), answer, "user", "tool")
    record = episode_record(episode, 1, 0)
    assert [tool["function"]["name"] for tool in record.tools or []] == ["open"]
    assert episode_metrics(episode)["tools/calls"] == 1
    first, told, last = record.messages[1:]
    assert first["tool_calls"][0]["function"] == {"name": "open", "arguments": {"code": 100}}
    assert json.loads(told["content"]) == {"number": 100, "calls": 1}
    assert "no more" in (last["content"] or last["reasoning_content"])
