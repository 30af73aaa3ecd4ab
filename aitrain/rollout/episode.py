"""Episodes, from the first prompt to the score, on any engine."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from aitrain import activity
from aitrain.environment.completion_parser import thought_of, without_thought
from aitrain.environment.contract import Case, Prompt, ScoreResult, Transcript, as_messages
from aitrain.environment.runner import EnvRunner, EnvSession, Runner, call_parts
from aitrain.environment.seeds import EpisodeSeeds, SampleSeed
from aitrain.environment.session import (
    AssistantTurn,
    EnvResponse,
    GroupMember,
    Message,
)
from aitrain.errors import EnvironmentFailed
from aitrain.execution.failure import Failure
from aitrain.rollout.chat_format import ChatFormat, Schemas
from aitrain.rollout.engine import (
    Decoding,
    Engine,
    GenerationRequest,
    Leave,
    OutOfRepliesError,
    Trajectory,
)

T = TypeVar("T")

STOPS = {
    "done": "the environment ended the episode",
    "max_tokens": "the environment ended the episode, whose last answer was cut off",
    "max_turns": "the episode has had --rl-max-turns answers",
    "truncated": "the episode has no room for another answer (--rl-max-episode-tokens, or the model's context)",
    "env_error": "the environment failed",
    "env_timeout": "a call of the environment did not return in time",
    "no_room": "the prompt leaves no room for an answer",
}
"""Why an episode ended."""

LIMITS = ("max_turns", "truncated")
"""The members of STOPS that the environment has no part in."""


@dataclass(eq=False)
class Episode(EnvSession):
    """One case, played and scored: the environment's side of it, the trajectory and the conversation."""

    sampling: EpisodeSeeds
    """Seeds of the completions."""
    decoding: Decoding = Decoding.TRAINING
    index: int = 0
    """Its place among the episodes that are played with it."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    messages: list[Message] = field(default_factory=list)
    """Messages of the policy and the environment, from the first turn on."""
    rendered_prompt: str = ""
    """The prompt as the chat template renders it; empty before that."""
    tool_calls: int = 0
    wrong_tool_calls: int = 0
    too_long: int | None = None
    """Tokens of a prompt that leaves no room for an answer, so that the episode is dropped: it takes no part."""

    @property
    def prompt(self) -> Prompt:
        """The conversation before the first turn: the row's prompt, and what the environment says first."""
        return self.case.prompt if self.reset.prompt is None else self.reset.prompt

    @property
    def is_chat(self) -> bool:
        """Whether the conversation is chat messages."""
        return not isinstance(self.prompt, str)

    @property
    def conversation(self) -> list[Message]:
        """All messages, beginning with the prompt; a prompt that is a string as a message of the user."""
        return [*as_messages(self.prompt), *self.messages]

    @property
    def transcript(self) -> Transcript:
        """The conversation, as `score_episode` gets it."""
        if self.is_chat:
            own = [message for message in self.messages if message["role"] == "assistant"]
            messages = list(map(without_thought, self.messages))
            return Transcript(self.case, messages, thought_of(own[-1]) if own else "")
        return Transcript(self.case, "".join(str(message["content"]) for message in self.messages))

    @property
    def as_member(self) -> GroupMember:
        """The episode, as `score_group` gets it."""
        said, messages = self.transcript, list(map(without_thought, self.conversation))
        return GroupMember(said.content, said.text, messages, self.result)

    @property
    def stop(self) -> str:
        """Why it ended, one of STOPS."""
        if self.failure is not None:
            return "env_timeout" if self.failure.kind == "timed_out" else "env_error"
        return self.trajectory.stop or "done"

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended it, and not the environment."""
        return self.stop in (*LIMITS, "max_tokens")

    def request(self, seed: int, max_tokens: int) -> GenerationRequest:
        """What is asked of the engine for a completion, whose prompt is to be set."""
        return GenerationRequest([], max_tokens, SampleSeed(seed), self.decoding, self.index)

    @property
    def failure_message(self) -> str:
        """The failure as a message with its case and place; empty if there is none."""
        failure = self.failure
        return "" if failure is None else f"{failure.place} of case {self.case.case_idx} {failure.message}"


@dataclass(frozen=True)
class Rollout:
    """Plays batches of episodes: `engine` is the policy's side, `runner` the environment's."""

    runner: Runner
    engine: Engine
    chat: ChatFormat
    context: int | None
    """Maximum tokens of prompt and completions together."""
    scoring: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Context in which environments score, such as one that serves their calls of the model."""

    async def play(
        self,
        cases: Sequence[Case],
        seeds: Sequence[int],
        sampling_seeds: Sequence[int],
        decoding: Decoding = Decoding.TRAINING,
        most: int = 1,
    ) -> list[Episode]:
        """One episode for each case, in their order; failures of the environment are in them. `seeds` are the
        environment's, `sampling_seeds` the policy's. `most`: cases of the rank that has most; all ranks play equally
        often, also without cases, as they may generate together."""
        rows = enumerate(zip(cases, seeds, map(EpisodeSeeds, sampling_seeds), strict=True))
        episodes = [Episode(*row, decoding=decoding, index=index) for index, row in rows]
        count = max(most, len(episodes))
        limits = (part.episodes_at_once for part in self.runner.parts.values())
        limit = min((most for most in limits if most), default=count)
        with activity.own.rollout(len(episodes)):
            for start in range(0, count, limit):
                await self._play_part(episodes[start : start + limit])
        return episodes

    async def _play_part(self, episodes: Sequence[Episode]) -> None:
        """First the episodes that may not run beside others, one after another, then the others at the same time."""
        together = list(episodes)
        async with self.engine.batch(0):  # on every rank, as those that share an engine enter and leave it together
            for episode in episodes:
                if self.runner.part_of(episode.case).plays_alone:
                    together.remove(episode)
                    await self._play([episode], nullcontext(lambda: None))
        await self._play(together)

    async def _play(self, episodes: list[Episode], batch: AbstractAsyncContextManager[Leave] | None = None) -> None:
        """Play and score episodes at the same time; `batch`: that of the engine, if it has begun."""
        with self.engine.clock.running("environment"):
            await call_parts(self.runner, EnvRunner.open, episodes)
        try:
            async with batch or self.engine.batch(len(episodes)) as leave:
                await run_all(self._converse(episode, leave) for episode in episodes)
            await self._score(episodes)
        finally:
            await call_parts(self.runner, EnvRunner.end, episodes)

    def _room(self, episode: Episode, trajectory: Trajectory, following: int = 0) -> int:
        """Maximum tokens of the trajectory's next completion. `following`: the tokens that are appended before it."""
        config, count = self.runner.part_of(episode.case).config, len(trajectory.ids) + following
        room = config.completion_tokens
        if config.rl_max_episode_tokens is not None:  # without the prompt
            room = min(room, config.rl_max_episode_tokens - count)
        if self.context is not None:
            room = min(room, self.context - len(trajectory.prompt_ids) - count)
        return room

    def _render_prompt(self, episode: Episode) -> None:
        reset, trajectory = episode.reset, episode.trajectory
        if reset.runs_tools:
            self.chat.check_tools(episode.is_chat)
        episode.rendered_prompt, ids = self.chat.render_prompt(episode.prompt, reset.tools)
        trajectory.prompt_ids = ids
        if self._room(episode, trajectory) < 1:
            trajectory.stop, trajectory.prompt_ids = "no_room", ids[:1]
            episode.too_long = len(ids)

    async def _converse(self, episode: Episode, leave: Leave) -> None:
        """Turns of the policy and responses of the environment, until something ends the episode."""
        trajectory = episode.trajectory

        async def respond(turn: AssistantTurn) -> EnvResponse:
            """The environment's response; its untrained conversations are answered until it continues the trained one.
            The episode is over if it fails."""
            while True:
                with self.engine.clock.running("environment"):
                    response = await self.runner.part_of(episode.case).respond(episode, turn)
                if response.is_trained:
                    return response
                turn = await self._answer(episode, response)

        try:
            if episode.failure is None and not episode.reset.is_trained:
                episode.reset = await respond(await self._answer(episode, episode.reset))
            if episode.failure is not None:
                return
            self._render_prompt(episode)
            chat = self._chat_of(episode)
            tools = episode.reset.tools if episode.reset.runs_tools else ()
            while trajectory.stop is None:
                asked = episode.request(episode.sampling.seed, self._room(episode, trajectory))
                turn = await sample_turn(self.engine, chat, trajectory, asked, tools)
                episode.messages.append(turn.message)
                episode.tool_calls += len(turn.calls)
                episode.wrong_tool_calls += sum(bool(call.problem) for call in turn.calls)
                response = await respond(turn)
                episode.wrong_tool_calls += response.wrong_calls
                trajectory.stop = self._apply(episode, response)
            if trajectory.stop in LIMITS and self.runner.part_of(episode.case).kind == "rollout":
                await respond(AssistantTurn("", limit=STOPS[trajectory.stop]))
        except EnvironmentFailed as error:
            failure = Failure("wrong_type", f"cannot be rendered: {error}", place="A message")
            episode.result = ScoreResult(None, failure=failure)
        except OutOfRepliesError:
            trajectory.stop = "out_of_replies"
        finally:
            activity.own.end_episode()
            leave()

    async def _answer(self, episode: Episode, asked: EnvResponse) -> AssistantTurn:
        """The policy's answer in an untrained conversation, sampled with a seed of its own."""
        chat, said = self._chat_of(episode), Trajectory(self.chat.prompt_ids(asked.prompt or [], asked.tools))
        if (room := self._room(episode, said)) < 1:
            what = f"a conversation of {len(said.prompt_ids)} tokens leaves no room for an answer"
            return AssistantTurn("", limit=what)
        request = episode.request(episode.sampling.next_call(), room)
        return await sample_turn(self.engine, chat, said, request, asked.tools)

    def _chat_of(self, episode: Episode) -> ChatFormat:
        """The chat format of an episode; a prompt that is a string has no template, and so no thoughts."""
        thoughts = self.chat.thoughts if episode.is_chat else None
        return replace(self.chat, keeps_thoughts=self.runner.part_of(episode.case).sees_thoughts, thoughts=thoughts)

    def _apply(self, episode: Episode, response: EnvResponse) -> str | None:
        """Append the environment's messages; returns why the episode ended, None if it continues."""
        trajectory = episode.trajectory
        if response.is_over:
            episode.messages += response.messages
            return "done" if trajectory.ended_by_policy else "max_tokens"
        if len(trajectory.turns) >= self.runner.part_of(episode.case).config.rl_max_turns:
            return "max_turns"
        ids = self.chat.following_ids(response.messages, trajectory.ids, episode.is_chat)
        if self._room(episode, trajectory, len(ids)) < 1:
            return "truncated"
        trajectory.append_env_tokens(ids)
        episode.messages += response.messages
        return None

    async def _score(self, episodes: list[Episode]) -> None:
        with self.engine.clock.running("environment"):
            async with self.scoring():
                await call_parts(
                    self.runner,
                    lambda part, own: part.score({one: one.transcript for one in own if one.too_long is None}),
                    episodes,
                )
        filler = self.engine.end.eos_ids[0]
        for trajectory in (episode.trajectory for episode in episodes):  # TRL takes no empty prompt or completion
            trajectory.prompt_ids = trajectory.prompt_ids or [filler]
            if not trajectory.ids:
                trajectory.append_env_tokens([filler])


async def sample_turn(
    engine: Engine,
    chat: ChatFormat,
    trajectory: Trajectory,
    request: GenerationRequest,
    tools: Schemas = (),
) -> AssistantTurn:
    """Append a turn of the policy, of at most `request.max_tokens` tokens; returns it as the environment gets it.

    A thought that has as many tokens as its budget is ended: the tokens of its end are appended, and are not sampled;
    then the policy answers.
    """
    before, start, room = trajectory.context, len(trajectory.ids), request.max_tokens
    budget = min(room, chat.thinking) if chat.thoughts and isinstance(chat.thinking, int) else room

    async def sample(max_tokens: int) -> list[int]:
        seed, continues_turn = replace(request.seed, position=trajectory.sampled_tokens), len(trajectory.ids) > start
        asked = replace(request, prompt_ids=trajectory.context, max_tokens=max_tokens, seed=seed)
        trajectory.append_completion(await engine.generate(asked), continues_turn)
        return trajectory.ids[start:]

    said = await sample(budget)
    if not trajectory.ended_by_policy and len(said) >= budget:
        ending = list[int]()
        if chat.thoughts is not None and chat.thought_tokens(said, before) is None:
            ending = chat.tokenizer.encode(chat.thoughts.ending, add_special_tokens=False)
        if (left := room - len(said) - len(ending)) > 0:
            trajectory.append_env_tokens(ending)
            said = await sample(left)
    if chat.thoughts is not None:
        trajectory.thoughts.append(sum(trajectory.mask[start:][: chat.thought_tokens(said, before)]))
    turn = chat.read(said, before, tools, engine.end.eos_ids)
    return replace(turn, prompt_tokens=len(before), tokens=len(said), is_cut=not trajectory.ended_by_policy)


async def run_all(coroutines: Iterator[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of coroutines that run at the same time; if one raises, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
