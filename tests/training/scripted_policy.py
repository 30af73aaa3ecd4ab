"""A policy whose answers are written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aitrain import TrainConfig
from aitrain.engines.hf import HFEngine
from aitrain.engines.sampling import Sampling
from aitrain.environment.contract import Case
from aitrain.rollout.chat_format import format_for_episodes
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.rollout.episode import Episode
from aitrain.training.chat_templates import chat_format
from tests.rollout.scripted import Limits, Scripted, play

Sample = Callable[[HFEngine, list[GenerationRequest], Sampling, int], list[Completion]]


def scripted(answer: Callable[[int, str], str]) -> Sample:
    """In the place of `HFEngine.sample`: what `answer` makes of each row's position in the batch and its text."""

    def sample(self: HFEngine, rows: list[GenerationRequest], sampling: Sampling, max_tokens: int) -> list[Completion]:
        tokenizer = self.tokenizer
        texts = [answer(position, tokenizer.decode(row.prompt_ids)) for position, row in enumerate(rows)]
        return [Completion(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    return sample


def played(
    environment: Any, tokenizer: Any, said: Callable[[str], str], *following: str, **options: Any
) -> tuple[Episode, list[GenerationRequest]]:
    """An episode of the environment's first case, whose later messages are of the roles `following`, and the requests
    that the policy got. `said` makes an answer of all text before it."""
    engine = Scripted(lambda _: "")

    async def generate(request: GenerationRequest) -> Completion:
        engine.requests.append(request)
        ids = tokenizer.encode(said(tokenizer.decode(request.prompt_ids)), add_special_tokens=False)
        is_cut, ids = len(ids) > request.max_tokens, ids[: request.max_tokens]
        return Completion(ids, [-1.0] * len(ids), is_cut)

    engine.generate = generate  # type: ignore[method-assign]
    chat = format_for_episodes(chat_format(tokenizer, TrainConfig(**options)), following)
    case = Case(0, environment.build_dataset()[0]["prompt"], {}, 0)
    engine.end = EndOfTurn([tokenizer.eos_token_id])
    (episode,) = play(environment, engine, Limits(9, 200), [case], chat)
    return episode, engine.requests
