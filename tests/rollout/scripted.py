"""Episodes without a model: a tokenizer of characters, and an engine whose completions are written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from aitrain import TrainConfig
from aitrain.environment.contract import Case
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, Decoding, Engine, GenerationRequest, Trajectory
from aitrain.rollout.episode import Episode, Rollout

EOS = ord("$")
END = EndOfTurn([EOS])


class Letters:
    """A tokenizer: one token is one character, and `$` ends a turn."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: list[Any], add_generation_prompt: bool = False, **_: Any) -> str:
        said = "".join(f"{message['role'][0]}:{message['content']}$" for message in conversation)
        return said + "a:" * add_generation_prompt


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def trained(trajectory: Trajectory) -> str:
    """What the policy sampled."""
    return text([token for token, own in zip(trajectory.ids, trajectory.mask, strict=True) if own])


class Limits(NamedTuple):
    """The options that limit an episode, and the context."""

    turns: int
    turn_tokens: int
    episode_tokens: int | None = None
    context: int | None = None


class Scripted(Engine):
    """An engine: each answer is a function of the text so far."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.end, self.answer, self.requests = END, answer, list[GenerationRequest]()

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        ids = [ord(letter) for letter in self.answer("".join(map(chr, request.prompt_ids)))][: request.max_tokens]
        return Completion(ids, [-1.0] * len(ids), not END.is_reached(ids))


def cases(count: int = 1, chat: bool = True) -> list[Case]:
    """Rows that ask for their own number."""
    prompts: list[Any] = [[user(f"{n}?")] if chat else f"{n}?" for n in range(count)]
    return [Case(n, prompt, {"prompt": prompt}, n) for n, prompt in enumerate(prompts)]


def play(
    environment: object, engine: Engine, limits: Limits | None = None, of: Sequence[Case] = (),
    chat: Any = None, notify: Callable[[str], None] | None = None,
    decoding: Decoding = Decoding.SEEDED, **options: Any,
) -> list[Episode]:  # fmt: skip
    """Episodes of these cases (one, if none are given), played to their end."""
    most = limits or Limits(9, 99)
    config = TrainConfig(
        rl_max_turns=most.turns,
        rl_max_new_tokens=most.turn_tokens,
        rl_max_episode_tokens=most.episode_tokens,
        **options,
    )

    async def rollout(runner: EnvRunner) -> list[Episode]:
        runner.notify = notify or runner.notify
        chosen = of or cases()
        played = Rollout(runner, engine, chat or ChatFormat(Letters()), most.context)
        return await played.play(chosen, range(len(chosen)), range(100, 100 + len(chosen)), decoding)

    with closing(start_runner(environment, config)) as runner:
        return asyncio.run(rollout(runner))


# -- environments with `rollout`, and with tools


class Asks:
    """Base of the environments: rows are not needed, as tests play cases of their own."""

    def build_dataset(self) -> list[Any]:
        return []


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def play_with_notes(
    environment: object, engine: Engine, limits: Limits | None = None, of: Sequence[Case] = (), **options: Any
) -> tuple[list[Episode], list[str]]:
    """Episodes of these cases (one, if none are given), and the notes that the user was shown."""
    notes: list[str] = []
    chat = ChatFormat(Letters(), has_tool_calls=True)  # a template that can write calls and their results
    return play(environment, engine, limits, of, chat, notes.append, **options), notes


def play_one(environment: object, engine: Engine, limits: Limits | None = None, **options: Any) -> Episode:
    """The episode of one case."""
    (episode,), _ = play_with_notes(environment, engine, limits, **options)
    return episode
