"""The environment's cases: built once, on the first process, and the same on every other one."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import datasets
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from aitrain.environment.contract import Case, Prompt, call_with_tokenizer
from aitrain.environment.loading import failure
from aitrain.environment.row_copies import copied_rows
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed
from aitrain.options.train import TrainConfig
from aitrain.training.chat import Chat
from aitrain.training.holding_out import HeldOutRows, hold_out

DEFAULT_EVAL_SHARE = 10
DEFAULT_EVAL_CASES = 64


@dataclass(frozen=True)
class Cases(Sequence[Case]):
    """Some rows of a dataset that the environment built; rows are looked up when asked for, not copied."""

    rows: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]
    """Which rows, and in which order."""
    offset: int = 0
    """Added to the number of a row: held-out rows of a dataset of their own are numbered on."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row, number = self.rows[self.numbers[index]], self.numbers[index] + self.offset
        return Case(row.get("case_idx", number), row["prompt"], row, number)

    @property
    def is_chat(self) -> bool:
        """Whether the prompts are chat messages: all rows have the same kind."""
        return bool(self[0].is_chat)

    def only(self, numbers: Sequence[int]) -> Cases:
        """The same dataset, other rows."""
        return replace(self, numbers=numbers)

    def as_dataset(self) -> datasets.Dataset:
        """What TRL shuffles and repeats: one column `case`, the index here. The rows never go through Arrow, so that
        whatever Python objects the environment put there reach it unchanged."""
        return datasets.Dataset.from_dict({"case": list(range(len(self)))})


def fingerprint(cases: Cases) -> str:
    """A hash over all rows in their order, prompts and columns: the same in another process, for the same content."""
    digest = hashlib.sha256()
    for case in cases:
        digest.update(_stable(case.row).encode(errors="replace"))
    return digest.hexdigest()


def _stable(value: Any) -> str:
    """A text that stands for a value, without addresses and without an order that a set does not have."""
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{_stable(key)}:{_stable(item)}" for key, item in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(map(_stable, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_stable, value)) + "]"
    if hasattr(value, "tolist"):  # arrays and tensors, which show only some of their numbers
        return _stable(value.tolist())
    text = f"{type(value).__qualname__} {value!r}"
    return type(value).__qualname__ if " at 0x" in text else text


@dataclass(frozen=True)
class Split:
    """What is trained on and what is held out, and how many cases were too long for it."""

    train: Cases
    held_out: Cases
    dropped: int
    dropped_held_out: int = 0
    left_out: int = 0
    """Cases that are neither: the model is shown the same for them as for held-out ones."""
    overlap: int = 0
    """Held-out cases for which the model is shown the same as for a training case."""


def build(environment: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[Cases, Cases | None]:
    """The environment's dataset, and its held-out one where it has `build_eval_dataset`.

    Raises:
        EnvironmentFailed: there is no dataset, it is empty, or it is not one that a model can be asked.
    """
    train, held_out = _on_first_process(environment, lambda: _build_both(environment, tokenizer))
    return train, held_out


def _build_both(environment: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[Cases, Cases | None]:
    train = _call(environment.build_dataset, tokenizer)
    build_eval = getattr(environment, "build_eval_dataset", None)
    if not callable(build_eval):
        return train, None
    held_out = replace(_call(build_eval, tokenizer), offset=len(train.rows))
    if held_out.is_chat != train.is_chat:
        raise EnvironmentFailed("build_dataset and build_eval_dataset must have the same kind of prompt")
    return train, held_out


def _call(method: Callable[..., Any], tokenizer: PreTrainedTokenizerBase) -> Cases:
    name = getattr(method, "__name__", "build_dataset")
    try:
        rows = _as_rows(name, call_with_tokenizer(method, tokenizer))
    except AitrainError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure(f"{name} raised", error)) from error
    _check_rows(name, rows)
    return Cases(rows, range(len(rows)))


def _as_rows(name: str, returned: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(returned, datasets.Dataset):
        return cast(Sequence[Mapping[str, Any]], returned)  # it has len and [], which is all that we use
    if isinstance(returned, Iterable) and not isinstance(returned, (str, bytes, Mapping)):
        return copied_rows(list(returned))  # the environment may keep its list and change it while it scores
    splits = f": return one of {', '.join(map(repr, returned))}" if isinstance(returned, datasets.DatasetDict) else ""
    raise EnvironmentFailed(
        f"{name} returned {'None' if returned is None else 'a ' + type(returned).__name__}{splits}\n"
        "Return a datasets.Dataset or a list of dicts, one a case."
    )


def _check_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if len(rows) == 0:
        raise EnvironmentFailed(f"{name} returned no rows: there is nothing to train on")
    first_is_chat = None
    for number, row in enumerate(rows):
        _check_prompt(f"row {number} of {name}", row)
        is_chat = not isinstance(row["prompt"], str)
        first_is_chat = is_chat if first_is_chat is None else first_is_chat
        if is_chat != first_is_chat:
            raise EnvironmentFailed(
                f"{name} mixes prompt types: row 0 has {'messages' if first_is_chat else 'a string'},"
                f" row {number} {'messages' if is_chat else 'a string'}.\nUse one of the two in all rows."
            )


def _check_prompt(place: str, row: Any) -> None:
    if not isinstance(row, Mapping):
        raise EnvironmentFailed(f"{place} is a {type(row).__name__}: return dicts with a prompt")
    if "prompt" not in row:
        raise EnvironmentFailed(f"{place} has no prompt (it has: {', '.join(map(str, row)) or 'nothing'})")
    if not _is_prompt(row["prompt"]):
        raise EnvironmentFailed(
            f"{place} has a prompt that cannot be asked: {repr(row['prompt'])[:60]}\n"
            'Use a string that is not empty, or messages: [{"role": "user", "content": "..."}]'
        )


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return isinstance(prompt, list) and bool(prompt) and all(_is_message(message) for message in prompt)


def _is_message(message: object) -> bool:
    """With text, with parts, or with tool calls in place of them."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), (str, list)) or bool(message.get("tool_calls"))


def columns(built: tuple[Cases, Cases | None]) -> set[str]:
    """What every row has, the held-out ones included: so much `score_episode` can ask for in every episode."""
    names = [_columns(cases.rows) for cases in built if cases is not None]
    return set.intersection(*names)


def _columns(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    if isinstance(rows, datasets.Dataset):
        return set(rows.column_names)
    return set.intersection(*(set(row) for row in rows))


# -- the same on every process


def _on_first_process(environment: Any, build_both: Callable[[], tuple[Cases, Cases | None]]) -> Any:
    """Build on the first process and hand the rest what it built, with what building changed on the environment
    (`self.cases = ...`): building again could give other rows, and then scores would belong to other prompts."""
    state = PartialState()
    if state.num_processes == 1:
        return build_both()
    parcel: list[Any] = [None]
    if state.is_main_process:
        before = pickled_attributes(environment)
        try:
            parcel = [(build_both(), changed_attributes(environment, before))]
        except AitrainError as error:
            parcel = [error]
    broadcast_object_list(parcel)
    if isinstance(parcel[0], AitrainError):
        raise parcel[0]
    built, changed = parcel[0]
    _attributes(environment).update({name: pickle.loads(value) for name, value in changed.items()})
    return built


def _attributes(environment: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = getattr(environment, "__dict__", {})
    return attributes


def pickled_attributes(environment: Any) -> dict[str, bytes | None]:
    """What the environment holds, to compare with later; None for what cannot be copied."""
    return {name: _pickled(value) for name, value in _attributes(environment).items()}


def _pickled(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:
        return None  # a lock, a client, an open file: every process keeps its own


def changed_attributes(environment: Any, before: Mapping[str, bytes | None]) -> dict[str, bytes]:
    """What has changed since, pickled, for the environment's copies in other processes.

    Raises:
        EnvironmentFailed: something was set that cannot be copied.
    """
    now = pickled_attributes(environment)
    lost = [name for name, value in now.items() if value is None and name not in before]
    if lost:
        raise EnvironmentFailed(
            f"build_dataset set self.{lost[0]}, which cannot be copied to the other processes.\n"
            "Set it in __init__, which runs on every process."
        )
    return {name: value for name, value in now.items() if value is not None and value != before.get(name)}


# -- choosing


def check_chat_template(cases: Cases, tokenizer: PreTrainedTokenizerBase) -> None:
    """Chat prompts need a chat template.

    Raises:
        ConfigError: there is none.
    """
    if cases.is_chat and tokenizer.chat_template is None:
        raise ConfigError(
            "chat_template: the prompts are chat messages and this model's tokenizer has no chat template.\n"
            "Choose one with --chat-template chatml, or let build_dataset return prompts that are strings."
        )


def split(built: tuple[Cases, Cases | None], config: TrainConfig, limit: PromptLimit, needed: int = 0) -> Split:
    """Drop prompts that are too long and hold cases out, by the seed; unasked, only what training does not need.

    Raises:
        ConfigError: nothing fits, or more is to be held out than there is.
    """
    everything, own_eval = built
    train, shown = _usable(everything, limit)
    dropped = len(everything) - len(train)
    if own_eval is None:
        rows = _hold_out(train, shown, config, needed)
        held, gone = set(rows.held_out), {*rows.held_out, *rows.left_out}
        trained = {key for place, key in enumerate(shown) if place not in gone}
        return Split(
            train.only([number for place, number in enumerate(train.numbers) if place not in gone]),
            train.only([number for place, number in enumerate(train.numbers) if place in held]),
            dropped,
            left_out=len(rows.left_out),
            overlap=sum(shown[place] in trained for place in held),
        )
    usable, shown_held_out = _usable(own_eval, limit)
    count = len(usable) if config.eval_cases is None else min(config.eval_cases, len(usable))
    held_out = usable.only(_chosen(usable, count, config.seed))
    key_of = dict(zip(usable.numbers, shown_held_out, strict=True))
    trained = set(shown)
    overlap = sum(key_of[number] in trained for number in held_out.numbers)
    return Split(train, held_out, dropped, len(own_eval) - len(usable), overlap=overlap)


def _usable(cases: Cases, limit: PromptLimit) -> tuple[Cases, list[bytes]]:
    """Those whose prompt is short enough, and for each of them what stands for what the model is shown."""
    found = {
        number: key for number, case in zip(cases.numbers, cases, strict=True) if (key := limit.shown(case.prompt))
    }
    return cases.only(list(found)), list(found.values())


def _hold_out(cases: Cases, shown: list[bytes], config: TrainConfig, needed: int) -> HeldOutRows:
    """Cases with the same prompt stay on one side. Where all prompts are the same, whole rows that are, do; and where
    these are, too, there is nothing to go by."""
    count, most = config.eval_cases, len(cases) - 1
    if count is None:
        most = max(0, len(cases) - needed)
        count = min(len(cases) // DEFAULT_EVAL_SHARE, DEFAULT_EVAL_CASES, most)
    if count and count >= len(cases):
        raise ConfigError(
            f"eval_cases: cannot hold out {count} of {len(cases)} cases: nothing would be left to train on"
        )
    keys: Sequence[Hashable] = shown
    if len(set(keys)) < 2:
        keys = [_stable(case.row) for case in cases]
    if len(set(keys)) < 2:
        keys = range(len(cases))
    return hold_out(keys, count, most, config.seed)


def _chosen(cases: Cases, count: int, seed: int) -> list[int]:
    """So many of the rows, chosen at random but always the same ones for a seed."""
    return sorted(random.Random(seed).sample(list(cases.numbers), count))


@dataclass(frozen=True)
class PromptLimit:
    """Whether a prompt is short enough, in tokens; the tools that it is shown with count."""

    chat: Chat
    tokens: int | None
    tools: Sequence[dict[str, Any]] = ()

    def shown(self, prompt: Prompt) -> bytes:
        """A hash of what the model is shown, the same for prompts that look the same to it; empty for one that is too
        long. Text of n bytes has at most n tokens, so most prompts need not be tokenized to know."""
        text = self.chat.prompt_text(prompt, self.tools).encode(errors="surrogatepass")
        if self.tokens is None or len(text) < self.tokens:
            return hashlib.sha256(text).digest()
        is_too_long = len(self.chat.prompt_ids(prompt, self.tools)) > self.tokens
        return b"" if is_too_long else hashlib.sha256(text).digest()


def prompt_limit(config: TrainConfig, context: int | None) -> int | None:
    """Most tokens of a prompt: the option's, and never more than the context leaves beside the episode, which is at
    least one answer.

    Raises:
        ConfigError: the episode alone is as long as the context.
    """
    name = "rl_max_new_tokens" if config.rl_max_episode_tokens is None else "rl_max_episode_tokens"
    episode = getattr(config, name)
    room = None if context is None else context - episode
    if room is not None and room < 1:
        raise ConfigError(f"{name}: {episode} new tokens leave no room for a prompt in a context of {context}")
    limits = [limit for limit in (config.rl_max_prompt_length, room) if limit is not None]
    return min(limits) if limits else None


def check_enough(split: Split, prompts_per_step: int, limit: int | None) -> None:
    """One step needs so many prompts.

    Raises:
        ConfigError: there are fewer.
    """
    if len(split.train) >= prompts_per_step:
        return
    too_long = f" ({split.dropped} had a prompt of more than {limit} tokens)" if split.dropped else ""
    ways = ["Build more cases" + (", with shorter prompts" if too_long else "")]
    if len(split.held_out):
        ways.append("hold out fewer (--eval-cases)")
    if len(split.train):
        ways.append(f"take fewer a step (--rl-prompts-per-step {len(split.train)})")
    raise ConfigError(
        f"One step needs {prompts_per_step} prompts and there are {len(split.train)} to train on{too_long}.\n"
        f"{', or '.join(ways)}."
    )
