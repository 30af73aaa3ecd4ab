"""Episodes of several turns on the real trainer: every sampled token is trained, and nothing else is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoTokenizer

from aitrain import ConfigError, EnvironmentFailed, Result, TrainConfig
from aitrain.engines.batching import BatchRow
from aitrain.engines.hf import HFEngine
from aitrain.environment.loader import load_env
from aitrain.environment.locator import find_env
from aitrain.rollout.engine import Completion, Decoding
from aitrain.runs.run_folder import read_lines
from aitrain.training.trainer import EpisodeTrainer
from tests.training.scripted_policy import scripted

Train = Callable[..., Result]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def rollouts(result: Result, when: str | None = None) -> list[dict[str, Any]]:
    records = read_lines(result.folder / "rollouts" / "rank0.jsonl")
    return [record for record in records if record.get("eval_phase") == when]


class Talk:
    """Chat prompts; asks twice more, and scores the letters below `n` of all answers."""

    def __init__(self, chat: bool = True, turns: int = 3) -> None:
        self.chat, self.turns = chat, turns

    def build_dataset(self) -> list[dict[str, Any]]:
        asked = [f"say {number}:" for number in range(12)]
        return [{"prompt": [{"role": "user", "content": text}] if self.chat else text} for text in asked]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return self.build_dataset()[:3]

    def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
        said = ""
        reply = yield None
        for turn in range(self.turns - 1):
            said += reply
            reply = yield f" more, {seed % 10}, {turn}? "
        said += reply
        return sum(letter < "n" for letter in said) / max(1, len(said))


@dataclass
class Watched:
    """What a trainer sampled and what it made of it."""

    rounds: list[list[list[int]]] = field(default_factory=list)
    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def sampled(self) -> list[list[int]]:
        """All answers of training, in the order in which they were sampled."""
        return [ids for answers in self.rounds for ids in answers]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The trainer with an eye on what it samples in training, and on the batches that the loss is made of."""
    watched = Watched()
    sample, score = HFEngine.sample, EpisodeTrainer._generate_and_score_completions

    def watch_sample(self: HFEngine, *arguments: Any) -> list[Completion]:
        completions = sample(self, *arguments)
        if self.policy.model.training:
            watched.rounds.append([completion.ids for completion in completions])
        return completions

    def watch_score(self: Any, inputs: Any) -> Any:
        output = score(self, inputs)
        watched.outputs.append(output)
        return output

    monkeypatch.setattr(HFEngine, "sample", watch_sample)
    monkeypatch.setattr(EpisodeTrainer, "_generate_and_score_completions", watch_score)
    return watched


def answers_with(monkeypatch: pytest.MonkeyPatch, text: Callable[[str], str]) -> None:
    """Let the policy answer what `text` makes of all it was given, and end the answer where it ends."""
    monkeypatch.setattr(HFEngine, "sample", scripted(lambda _, given: text(given)))


# -- what is in the loss


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "strings"])
def test_every_sampled_token_is_in_the_loss_and_no_other(train: Train, watched: Watched, chat: bool) -> None:
    result = train(Talk(chat), rl_prompts_per_step=2, batch_size=4)

    for number, output in enumerate(watched.outputs):
        in_loss = (output["completion_mask"] * output["tool_mask"]).bool()
        rounds = watched.rounds[3 * number : 3 * number + 3]
        for row, answers in enumerate(zip(*rounds, strict=True)):
            assert output["completion_ids"][row][in_loss[row]].tolist() == list(chain(*answers))
        assert output["num_items_in_batch"] == in_loss.sum() == sum(map(len, chain(*rounds)))
        assert (output["completion_mask"].bool() & ~in_loss).any()
    assert sum(record["tokens"] for record in rollouts(result)) == sum(map(len, watched.sampled()))
    assert {len(record["turns"]) for record in rollouts(result)} == {3}


def test_the_environments_tokens_do_not_move_the_weights(train: Train, watched: Watched) -> None:
    """The loss does not change when the probabilities of the environment's tokens do."""
    kept: list[Any] = []
    compute = EpisodeTrainer._compute_loss

    def keep(self: Any, model: Any, inputs: Any) -> Any:
        kept.append((self, model, dict(inputs)))
        return compute(self, model, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpisodeTrainer, "_compute_loss", keep)
        train(Talk(), max_steps=1, rl_prompts_per_step=2, batch_size=4)
    trainer, model, inputs = kept[-1]
    logps = EpisodeTrainer._get_per_token_logps_and_entropies
    said = (inputs["completion_mask"] * (1 - inputs["tool_mask"])).bool()
    assert said.any()

    def loss(shift: float, where: torch.Tensor) -> float:
        def shifted(self: Any, *arguments: Any, **options: Any) -> Any:
            values, *rest = logps(self, *arguments, **options)
            return (values + shift * where, *rest)

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(EpisodeTrainer, "_get_per_token_logps_and_entropies", shifted)
            return float(compute(trainer, model, {**inputs, "advantages": torch.ones_like(inputs["advantages"])}))

    ratio_of = {**inputs}
    ratio_of["old_per_token_logps"] = torch.zeros_like(inputs["completion_ids"], dtype=torch.float)
    inputs.update(ratio_of)
    assert loss(0.5, said) == loss(0.0, said)
    assert loss(0.5, ~said) != loss(0.0, said)


APPENDING = ["qwen2_5", "qwen3_instruct_2507", "llama3", "llama3_1", "gemma", "gemma3", "cohere", "phi3", "lfm2"]
SWAPPED = ["qwen3"]


@pytest.fixture
def speaks(small_model: Path, tmp_path: Path) -> Callable[[str], str]:
    """`speaks("gemma")`: the small model, with a chat template that TRL ships."""

    def model_with(name: str) -> str:
        folder = tmp_path / name
        shutil.copytree(small_model, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="<|endoftext|>")
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        tokenizer.save_pretrained(folder)
        return str(folder)

    return model_with


@pytest.mark.parametrize("ends", ["<|im_end|>", ""], ids=["ended", "cut"])
@pytest.mark.parametrize("name", APPENDING)
def test_an_episode_is_written_as_its_chat_template_writes_it(
    train: Train,
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
    speaks: Callable[[str], str],
    name: str,
    ends: str,
) -> None:
    answers_with(monkeypatch, lambda given: f"answer {given.count('more')}{ends}")
    result = train(Talk(), max_steps=1, model=speaks(name), rl_max_new_tokens=40)

    tokenizer = AutoTokenizer.from_pretrained(result.folder / "model")
    record = rollouts(result)[0]
    assert [message["content"] for message in record["messages"] if message["role"] == "assistant"] == [
        "answer 0", "answer 1", "answer 2"
    ]  # fmt: skip
    output = watched.outputs[0]
    given = output["prompt_ids"][0][output["prompt_mask"][0].bool()].tolist()
    written = tokenizer.decode(given + output["completion_ids"][0][output["completion_mask"][0].bool()].tolist())
    expected = tokenizer.apply_chat_template(record["messages"], tokenize=False)
    in_loss = (output["completion_mask"][0] * output["tool_mask"][0]).bool()
    assert tokenizer.decode(output["completion_ids"][0][in_loss]) == "".join(
        f"answer {turn}{ends}" for turn in range(3)
    )
    eos = "<|im_end|>" if ends else ""
    assert without(written, eos) == without(expected[: expected.rindex("answer 2") + len("answer 2")], eos)


def without(text: str, eos: str) -> str:
    """The scripted model ends its answers with its own end token, whatever the template's is."""
    return text.replace(eos, "") if eos else text


@pytest.mark.parametrize("name", SWAPPED)
def test_a_template_that_is_not_prefix_preserving_is_swapped_for_the_one_for_training(
    train: Train, capsys: pytest.CaptureFixture[str], speaks: Callable[[str], str], name: str
) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text()
    result = train(Talk(), max_steps=1, model=speaks(name))

    assert "TRL's training template is used" in capsys.readouterr().err
    assert (result.folder / "model" / "chat_template.jinja").read_text() == template


FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_template_that_is_not_prefix_preserving_is_refused_if_there_is_no_other(train: Train, tmp_path: Path) -> None:
    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)

    with pytest.raises(ConfigError, match="is not prefix-preserving: it renders earlier turns differently"):
        train(Talk(), chat_template=str(tmp_path / "forgetful.jinja"))


def test_one_turn_may_have_a_template_that_is_not_prefix_preserving(train: Train, tmp_path: Path) -> None:
    class Once(Talk):
        episode = None  # type: ignore[assignment]

        def score_episode(self, text: str) -> float:
            return 1.0

    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)
    assert train(Once(), max_steps=1, chat_template=str(tmp_path / "forgetful.jinja")).steps == 1


# -- limits


@pytest.mark.parametrize(
    ("options", "stop", "turns"),
    [
        ({"rl_max_new_tokens": 40}, "done", 3),
        ({"rl_max_new_tokens": 4}, "max_tokens", 3),
        ({"rl_max_new_tokens": 40, "rl_max_turns": 2}, "max_turns", 2),
        ({"rl_max_new_tokens": 20, "rl_max_episode_tokens": 22}, "truncated", 1),
        ({"rl_max_new_tokens": 20, "model_max_length": 48}, "truncated", 2),
    ],
)
def test_what_ended_an_episode_is_on_record(
    train: Train, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], stop: str, turns: int
) -> None:
    answers_with(monkeypatch, lambda given: "an answer<|im_end|>"[: options["rl_max_new_tokens"]])
    result = train(Talk(chat=False), max_steps=1, **options)

    for record in rollouts(result):
        assert (record["stop"], len(record["turns"])) == (stop, turns)
        assert record["score"] == (pytest.approx(record["score"]) if stop in ("done", "max_tokens") else 0.0)
    assert result.history[0][f"stopped/{stop}"] == 1.0


def test_the_record_says_how_many_steps_the_policy_had_done(train: Train) -> None:
    """Where a batch is trained on twice, its second step is made with what the policy sampled before the first one."""
    result = train(Talk(), max_steps=4, eval_cases=2, trl={"num_iterations": 2})
    assert sorted({(record["step"], record["weight_version"]) for record in rollouts(result)}) == [(1, 0), (3, 2)]
    assert {record["weight_version"] for record in rollouts(result, "after_greedy")} == {4}


def test_no_episode_is_longer_than_its_budget(train: Train, watched: Watched) -> None:
    train(Talk(turns=30), rl_max_episode_tokens=50, rl_max_new_tokens=6)

    for output in watched.outputs:
        assert output["completion_mask"].sum(dim=1).max() <= 50
        assert (output["completion_mask"] * output["tool_mask"]).sum(dim=1).min() > 0


class Uneven(Talk):
    """The first case's episodes are much longer than the other ones'."""

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:  # type: ignore[override]
        yield None
        yield "x" * (80 if case_idx == 0 else 5)
        return 0.5


def test_nothing_is_generated_beyond_the_context_and_no_answer_is_cut_for_another_ones_length(
    train: Train, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    sample = HFEngine.sample

    def watch(self: HFEngine, rows: list[BatchRow], max_tokens: int, decoding: Decoding) -> list[Completion]:
        lengths.append(max(len(row.prompt_ids) for row in rows) + max_tokens)
        return sample(self, rows, max_tokens, decoding)

    monkeypatch.setattr(HFEngine, "sample", watch)
    result = train(
        Uneven(),
        max_steps=1,
        rl_prompts_per_step=12,
        batch_size=8,
        rl_max_new_tokens=30,
        model_max_length=180,
        rl_top_k=50,
    )

    assert max(lengths) <= 180
    for record in rollouts(result):
        is_long = record["case_idx"] == 0
        assert len(record["turns"]) == 2
        answers = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
        assert is_long or record["stop"] == "done" or record["tokens"] == 60, answers


def test_a_budget_that_the_context_cannot_hold_is_refused_before_training(train: Train) -> None:
    with pytest.raises(ConfigError, match="rl_max_episode_tokens: 3000 new tokens leave no room"):
        train(Talk(), rl_max_episode_tokens=3000)
    with pytest.raises(ConfigError, match="rl_max_episode_tokens: 5 is less than one completion of 6 tokens"):
        train(Talk(), rl_max_episode_tokens=5)


# -- seeds


def test_the_seed_is_one_for_a_group_and_another_for_each_group_and_step(train: Train) -> None:
    result = train(Talk(), rl_prompts_per_step=3, batch_size=4)

    groups: dict[tuple[int, int], set[int]] = {}
    for record in rollouts(result):
        groups.setdefault((record["step"], record["group"]), set()).add(record["seed"])
    assert len(groups) == 9
    assert all(len(seeds) == 1 for seeds in groups.values())
    assert len(set.union(*groups.values())) == 9


def test_held_out_cases_are_played_to_the_end_with_the_same_seeds_every_time(train: Train) -> None:
    result = train(Talk())

    before, after = rollouts(result, "before_sampled"), rollouts(result, "after_sampled")
    assert [record["seed"] for record in before] == [record["seed"] for record in after]
    assert {len(record["turns"]) for record in [*before, *after]} == {3}


# -- tools


class Vault(Talk):
    """A number is behind a tool; every episode counts its own calls."""

    episode = None  # type: ignore[assignment]

    def start(self, case_idx: int) -> Vault:
        mine = Vault()
        mine.number, mine.calls = case_idx, 0
        return mine

    def get_tools(self) -> list[Any]:
        return [self.open]

    def open(self, code: int) -> dict[str, int]:
        """Open the vault.

        Args:
            code: The code.
        """
        self.calls += 1
        return {"number": self.number + code, "calls": self.calls}

    def step(self, reply: str) -> str | None:
        self.reply = reply
        return None

    def score(self) -> float:
        return float(getattr(self, "reply", None) == f"it is {self.number + 100}")


def open_the_vault(given: str) -> str:
    """First a wrong call, then a right one, then what it said."""
    answers = given.split("<|im_start|>tool\n")[1:]
    if not answers:
        return '<tool_call>\n{"name": "open", "arguments": {}}\n</tool_call><|im_end|>'
    if len(answers) == 1:
        return '<tool_call>\n{"name": "open", "arguments": {"code": 100}}\n</tool_call><|im_end|>'
    return f"it is {json.loads(answers[-1].partition('<|im_end|>')[0])['number']}<|im_end|>"


def test_tools_are_shown_called_and_answered(train: Train, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    answers_with(monkeypatch, open_the_vault)
    result = train(Vault(), max_steps=1, rl_max_new_tokens=100)

    for record in rollouts(result):
        assert record["score"] == 1.0
        assert [message["role"] for message in record["messages"][1:]] == [
            "assistant", "tool", "assistant", "tool", "assistant"
        ]  # fmt: skip
        assert "code" in record["messages"][2]["content"]
        assert json.loads(record["messages"][4]["content"]) == {"number": record["case_idx"] + 100, "calls": 1}
    assert result.history[0]["tools/calls"] == 2.0
    assert result.history[0]["tools/wrong_calls"] == 1.0
    prompt = watched.outputs[0]["prompt_ids"][0]
    assert '"name": "open"' in AutoTokenizer.from_pretrained(result.folder / "model").decode(prompt)


QWEN = '<tool_call>\n{"name": "open", "arguments": {"code": 100}}\n</tool_call>'
LLAMA = '{"name": "open", "parameters": {"code": 100}}<|eot_id|>'
QWEN_3_6 = (
    "100, I think.\n</think>\n\n"
    "<tool_call>\n<function=open>\n<parameter=code>\n100\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("name", "call"), [("qwen2_5", QWEN), ("qwen3", QWEN), ("llama3_1", LLAMA), ("qwen3_6", QWEN_3_6)]
)
def test_calls_are_read_as_the_models_own_template_writes_them(
    train: Train, monkeypatch: pytest.MonkeyPatch, speaks: Callable[[str], str], name: str, call: str
) -> None:
    answers_with(monkeypatch, lambda given: "no more" if re.search(r"calls\W+1", given) else call)
    result = train(Vault(), model=speaks(name), max_steps=1, rl_max_new_tokens=100)

    for record in rollouts(result):
        first, told, last = record["messages"][1:]
        assert first["tool_calls"][0]["function"] == {"name": "open", "arguments": {"code": 100}}
        assert json.loads(told["content"]) == {"number": record["case_idx"] + 100, "calls": 1}
        assert "no more" in (last["content"] or last["reasoning_content"])


def test_tools_and_string_prompts_do_not_go_together(train: Train) -> None:
    with pytest.raises(ConfigError, match="prompts that are strings"):
        train(Vault(chat=False))


def test_a_model_whose_template_cannot_write_tools_is_refused(train: Train) -> None:
    with pytest.raises(ConfigError, match="cannot write calls and results"):
        train(Vault(), chat_template="chatml")


def test_the_hotel_environment_trains_on_the_tiny_model(train: Train) -> None:
    environment = load_env(find_env(TrainConfig(rl_env="envs.hotel_booking")), {})
    short = {"max_steps": 1, "rl_num_generations": 2, "batch_size": 2, "rl_max_new_tokens": 4, "rl_max_turns": 8}
    result = train(environment, model="tiny", rl_prompts_per_step=1, eval_cases=1, **short)

    assert result.status == "finished"
    assert all(record["error"] is None and len(record["turns"]) > 1 for record in rollouts(result))


# -- failures


class Sick(Talk):
    """Falls ill at a place that the case decides."""

    episode = None  # type: ignore[assignment]
    places = ("start", "step", "score", "close", "get_tools", "said", "none")

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{**row, "case_idx": 3} for row in super().build_eval_dataset()]

    def start(self, case_idx: int) -> Sick:
        mine = Sick()
        mine.place = self.places[case_idx % len(self.places)]
        mine.fail("start")
        return mine

    def fail(self, here: str) -> None:
        if self.place == here:
            raise RuntimeError(f"ill at {here}")

    def get_tools(self) -> list[Any]:
        if hasattr(self, "place"):
            self.fail("get_tools")
        return []

    def step(self, reply: str) -> Any:
        self.fail("step")
        return 5 if self.place == "said" else None

    def score(self) -> float | None:
        self.fail("score")
        return None if self.place == "none" else 0.5

    def close(self) -> None:
        self.fail("close")


def test_an_episode_that_fails_anywhere_is_missing_data(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(Sick(), rl_prompts_per_step=12, batch_size=8, rl_max_failed=1.0, max_steps=1)

    for record in rollouts(result):
        place = Sick.places[record["case_idx"] % len(Sick.places)]
        is_scored = place == "close"
        assert record["score"] == (0.5 if is_scored else None)
        assert record["stop"] in (("done", "max_tokens") if is_scored or place == "none" else ("env_error",))
        assert (record["error"] or {}).get("place") == (
            None if is_scored or place == "none" else {"said": "step"}.get(place, place)
        )
    told = capsys.readouterr().err
    assert "raised: RuntimeError: ill at" in told
    assert 'raise RuntimeError(f"ill at {here}")' in told
    assert "responded with 5 (int), which is neither text nor messages" in told


def test_an_environment_that_cannot_begin_is_refused_before_training(train: Train) -> None:
    class Never(Sick):
        places = ("start",)

    with pytest.raises(EnvironmentFailed, match="failed on all 3 held-out cases"):
        train(Never())


def test_too_many_failures_in_three_batches_in_a_row_end_the_run(train: Train) -> None:
    class Often(Talk):
        def build_eval_dataset(self) -> list[dict[str, Any]]:
            return [{**row, "case_idx": 1} for row in super().build_eval_dataset()]

        def episode(self, case_idx: int) -> Generator[None, str, float]:  # type: ignore[override]
            yield
            if case_idx % 3:
                return 0.5
            raise RuntimeError("ill")

    with pytest.raises(EnvironmentFailed, match=r"More than 20% of the episodes failed in 3 batches in a row"):
        train(Often(), rl_prompts_per_step=9, batch_size=4, max_steps=8, rl_max_failed=0.2)
    assert train(Often(), rl_prompts_per_step=9, batch_size=4, max_steps=4).steps == 4


@pytest.mark.parametrize("is_chat", [True, False])
def test_calls_of_tools_that_are_only_schemas_are_left_to_score_episode(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_chat: bool
) -> None:
    class ReadsItsCalls(Talk):
        episode = None  # type: ignore[assignment]

        def get_tools(self) -> list[Any]:
            return [{"type": "function", "function": {"name": "unlock", "parameters": {"type": "object"}}}]

        def score_episode(self, model: Any, tokenizer: Any, completion: Any, case_idx: int) -> float:
            said = completion if isinstance(completion, str) else completion[0]["content"]
            return float(said == call) * 0.5

    call = '<tool_call>{"name": "unlock", "arguments": {}}</tool_call>'
    asked: list[str] = []

    def answer(given: str) -> str:
        asked.append(given)
        return call

    answers_with(monkeypatch, answer)

    result = train(ReadsItsCalls(chat=is_chat), max_steps=1, rl_max_new_tokens=64)

    assert result.history[0]["reward"] == 0.5
    assert result.history[0].get("tools/calls", 0.0) == 0.0
    assert ('"unlock"' in asked[0]) == is_chat
    assert "get_tools" in capsys.readouterr().err
