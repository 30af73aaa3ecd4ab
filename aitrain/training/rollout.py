"""Episodes: a whole batch advances together, one generate call a round, then all of the environment's steps at once.

Where a server answers each episode by itself, every episode goes on as soon as its environment has answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from aitrain import activity
from aitrain.environment.contract import Case, Completion
from aitrain.environment.dialogue import Message, Move, Reply
from aitrain.environment.failures import Failure
from aitrain.environment.judging import Scored
from aitrain.environment.scoring import Host, Play
from aitrain.environment.seeds import Draw, EpisodeSeeds
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.training.chat import Chat
from aitrain.training.generation.stopping import StopStrings
from aitrain.training.stopwatch import Stopwatch

STOPS = ("done", "max_tokens", "max_turns", "truncated", "env_error", "env_timeout")
"""What ends an episode: the environment (max_tokens: after an answer that was cut off), the turns, no room for another
answer, or a failure."""

TRUNCATED = ("max_tokens", "max_turns", "truncated")
"""Those of them that are limits of ours."""


@dataclass(frozen=True)
class Limits:
    """How long an episode may get; tokens of the prompt count for the context only."""

    turns: int
    answer_tokens: int
    episode_tokens: int | None = None
    context: int | None = None

    def room(self, prompt: int, completion: int) -> int:
        """Tokens that the next answer may have after a prompt and a completion of so many."""
        ends = [self.answer_tokens]
        if self.episode_tokens is not None:
            ends.append(self.episode_tokens - completion)
        if self.context is not None:
            ends.append(self.context - prompt - completion)
        return min(ends)


@dataclass(frozen=True)
class Sampled:
    """One answer as it was sampled: token ids, and their log-probabilities where the engine says them."""

    ids: list[int]
    logprobs: list[float] | None = None

    def first(self, count: int) -> Sampled:
        """At most so many tokens of it."""
        return Sampled(self.ids[:count], None if self.logprobs is None else self.logprobs[:count])


class Generate(Protocol):
    """One answer to each prompt, of at most so many tokens; None when no process has a prompt left. `begun` says how
    many tokens at the end of each prompt belong to the answer: an earlier call has generated them. `draws`: what each
    is sampled with, None where the episode has no seed."""

    def __call__(
        self, prompts: list[list[int]], most: int, begun: Sequence[int], draws: Sequence[Draw | None]
    ) -> list[Sampled] | None: ...


class Asking(Protocol):
    """Answers that are asked for one by one and come when they come; `wake` of the workers says that some have."""

    @property
    def waiting(self) -> int:
        """How many have not come yet, or not been taken."""

    def ask(self, track: Track, prompt: list[int], most: int, draw: Draw | None) -> None:
        """For an answer of at most so many tokens, sampled with this."""

    def answered(self) -> list[tuple[Track, tuple[list[int], list[float]]]]:
        """Those that have come, as token ids and log-probabilities; waits for none."""


@dataclass(eq=False)
class Track:
    """The model's side of one episode under way. `ids`, `mask` and `logprobs` have one entry a token after the prompt;
    the mask is 1 for what the model sampled, 0 for what the environment said."""

    play: Play
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    opening: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """Where in `ids` each answer begins."""
    is_answering: bool = False
    """Whether that answer still goes on: the batch had less room than this episode has."""
    turns: int = 0
    calls: int = 0
    wrong_calls: int = 0
    stop: str | None = None

    def append_sampled(self, sampled: Sampled, is_whole: bool) -> None:
        """What the model said, an answer or the next piece of one: trained."""
        if not self.is_answering:
            self.answers.append(len(self.ids))
            self.turns += 1
        self.ids += sampled.ids
        self.mask += [1] * len(sampled.ids)
        self.logprobs += sampled.logprobs or [0.0] * len(sampled.ids)
        self.is_answering = not is_whole

    def append_said(self, ids: list[int]) -> None:
        """What the environment said: not trained."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    @property
    def draw(self) -> Draw | None:
        """What the next tokens are sampled with; None: with the engine's own random numbers."""
        sampling = self.play.sampling
        return None if sampling is None else Draw(sampling.seed, sum(self.mask))

    @property
    def last_answer(self) -> int:
        """Where in `ids` the newest answer begins."""
        return self.answers[-1] if self.answers else 0

    @property
    def unfinished(self) -> list[int]:
        """The tokens of an answer that still goes on."""
        return self.ids[self.last_answer :] if self.is_answering else []

    @property
    def last(self) -> int:
        """The newest token; -1, which is none, before there is one."""
        return self.ids[-1] if self.ids else -1

    @property
    def completion(self) -> Completion:
        """All that followed the prompt, as the environment is shown it."""
        case = self.play.case
        if case.is_chat:
            return Completion(case, self.messages)
        return Completion(case, "".join(str(message["content"]) for message in self.messages))


@dataclass(frozen=True)
class Episode:
    """One case played to its end and scored."""

    track: Track
    scored: Scored

    @property
    def case(self) -> Case:
        """What was asked."""
        return self.track.play.case

    @property
    def stop(self) -> str:
        """What ended it, one of STOPS."""
        if self.scored.failure is not None:
            return "env_timeout" if self.scored.failure.kind == "timed_out" else "env_error"
        return self.track.stop or "done"

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended it, and not the environment."""
        return self.stop in TRUNCATED

    @property
    def told(self) -> str:
        """The failure as the user reads it, with its case and place."""
        failure = self.scored.failure
        return "" if failure is None else f"{failure.place} of case {self.case.case_idx} {failure.message}"


@dataclass(frozen=True)
class Rollout:
    """Plays episodes with a policy: `generate` is the policy's side, `host` the environment's."""

    host: Host
    chat: Chat
    limits: Limits
    generate: Generate
    ends: Sequence[int]
    """Tokens that end an answer; the first one also fills a completion that would be empty."""
    scoring: Callable[[], AbstractContextManager[Any]]
    """What the model is put into while the environment scores, as it may use it."""
    asking: Callable[[], Asking] | None = None
    """Where a server answers each prompt by itself: episodes need not wait for each other."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    stops: StopStrings | None = None
    """Texts that end an answer as well."""
    is_padded: bool = True
    """Whether `generate` pads all prompts to the longest one, whose limit is then that of all of them."""

    def play(
        self, cases: Sequence[Case], seeds: Sequence[int], sampling_seeds: Sequence[int] | None = None
    ) -> list[Episode]:
        """One episode for each case, in their order; the environment's failures are in them. `seeds` are the
        environment's, `sampling_seeds` decide what the policy samples (None: the engine's own random numbers do)."""
        with self.watch.running("rollout"):
            tracks = self._begin(cases, seeds)
            for track, seed in zip(tracks, sampling_seeds or (), strict=sampling_seeds is not None):
                track.play.sampling = EpisodeSeeds(seed)
            self._run([track for track in tracks if track.stop is None])
            return self._score(tracks)

    def _run(self, live: list[Track]) -> None:
        with self.watch.running("generate"):
            policy = self.asking() if self.asking else None  # which may hand it new weights
        if policy is not None and self.host.lives_between_calls:
            self._run_freely(live, policy)
        else:
            self._run_together(live)

    def _run_together(self, live: list[Track]) -> None:
        while self._answer(live):
            self._respond([track for track in live if not track.is_answering])
            live = [track for track in live if track.stop is None]

    def _run_freely(self, live: list[Track], policy: Asking) -> None:
        """Each episode is always with the policy or with its environment; news of either side wake this thread."""
        tracks = {id(track.play): track for track in live}
        with self.host.answering() as environment:
            for track in live:
                policy.ask(track, track.prompt_ids, self._room(track), track.draw)
            while policy.waiting or environment.waiting:
                for track, (ids, logprobs) in policy.answered():
                    track.append_sampled(Sampled(ids, logprobs), is_whole=True)
                    environment.ask(track.play, self._read(track))
                waited_for = {"generate": policy.waiting, "environment": environment.waiting}
                with self.watch.running(*(part for part, count in waited_for.items() if count)):
                    moves = environment.answered()
                for play, move in moves:
                    track = tracks[id(play)]
                    self._take(track, move)
                    if track.stop is None:
                        policy.ask(track, track.prompt_ids + track.ids, self._room(track), track.draw)

    def _begin(self, cases: Sequence[Case], seeds: Sequence[int]) -> list[Track]:
        with self.watch.running("environment"):
            tracks = [Track(play) for play in self.host.begin(cases, seeds)]
        for track in tracks:
            track.opening = list(track.play.opening.messages)
            with _refusals(track.play):
                track.prompt_ids = self._prompt_ids(track.play)
            if track.play.failure is None and self._room(track) < 1:
                what = f"prompt and tools have {len(track.prompt_ids)} tokens, which leaves no room for an answer"
                track.play.failure = Failure("wrong_type", what, place="The beginning")
            if track.play.failure is not None:
                track.stop = "env_error"
                track.prompt_ids = track.prompt_ids[:1] or [self.ends[0]]  # never answered, so that they do not matter
        return tracks

    def _prompt_ids(self, play: Play) -> list[int]:
        said, tools = play.opening.messages, play.opening.tools
        if isinstance(play.case.prompt, str):
            refuse_tools_for_strings(tools)
            return self.chat.prompt_ids(play.case.prompt + "".join(str(message["content"]) for message in said))
        if play.opening.runs_tools:
            self.chat.check_tools()
        return self.chat.prompt_ids([*play.case.prompt, *said], tools)

    def _room(self, track: Track) -> int:
        """Tokens that its answer, or what is left of it, may have."""
        room = self.limits.room(len(track.prompt_ids), len(track.ids))
        return min(room, self.limits.answer_tokens - len(track.unfinished))

    def is_ended(self, track: Track) -> bool:
        """Whether the newest answer was ended by the model, and not cut off."""
        return self._is_end(track.ids[track.last_answer :]) and track.mask[-1] == 1

    def _is_end(self, answer: list[int]) -> bool:
        return answer[-1:] != [] and (answer[-1] in self.ends or (self.stops is not None and self.stops.ends(answer)))

    def _answer(self, live: list[Track]) -> bool:
        """One answer for each; False when no process has a live episode any more.

        No row is generated beyond the context, which some models cannot: where the longest episode has less room than
        the others, those get the rest of their answers in the next round.
        """
        prompts = [track.prompt_ids + track.ids for track in live]
        rooms = [self._room(track) for track in live]
        most = max(rooms, default=1)
        if self.is_padded and self.limits.context is not None and live:
            most = min(most, self.limits.context - max(map(len, prompts)))
        with self.watch.running("generate"), activity.own.doing("generating"):
            begun = [len(track.unfinished) for track in live]
            answers = self.generate(prompts, most, begun, [track.draw for track in live])
        if answers is None:
            return False
        for track, room, sampled in zip(live, rooms, answers, strict=True):
            kept = sampled.first(room)
            is_ended = len(sampled.ids) < most or self._is_end(track.unfinished + kept.ids)  # engines may know others
            track.append_sampled(kept, is_whole=is_ended or len(kept.ids) == room)
        return True

    def _respond(self, live: list[Track]) -> None:
        replies = [self._read(track) for track in live]
        with self.watch.running("environment"):
            moves = self.host.answer([track.play for track in live], replies)
        for track, move in zip(live, moves, strict=True):
            self._take(track, move)

    def _read(self, track: Track) -> Reply:
        """The newest answer, as a message of the conversation and as the environment gets it."""
        start, opening = track.last_answer, track.play.opening
        tools = opening.tools if opening.runs_tools else ()
        before = track.prompt_ids + track.ids[:start]
        answer = self.chat.read(track.ids[start:], before, tools, self.ends)
        track.messages.append(answer.message)
        return answer.reply

    def _take(self, track: Track, move: Move) -> None:
        """What the environment did; the episode goes on after it or is over."""
        track.calls += move.calls
        track.wrong_calls += move.wrong_calls
        track.stop = self._why_over(track, move) or self._go_on(track, move)

    def _why_over(self, track: Track, move: Move) -> str | None:
        if track.play.failure is not None:
            return "env_error"
        if move.is_over:
            return "done" if self.is_ended(track) else "max_tokens"
        return "max_turns" if track.turns >= self.limits.turns else None

    def _go_on(self, track: Track, move: Move) -> str | None:
        """Append what the environment said; where that leaves no room for an answer, the episode ends before it."""
        said: list[int] = []
        with _refusals(track.play):
            said = self.chat.following_ids(move.messages, track.last, track.play.case.is_chat)
        if track.play.failure is not None:
            return "env_error"
        if self.limits.room(len(track.prompt_ids), len(track.ids) + len(said)) < 1:
            return "truncated"
        track.append_said(said)
        track.messages += move.messages
        return None

    def _score(self, tracks: list[Track]) -> list[Episode]:
        plays = [track.play for track in tracks]
        with self.watch.running("environment"), self.scoring():
            scored = self.host.score(plays, [track.completion for track in tracks])
        self.host.end(plays)
        for track in tracks:
            if not track.ids:
                track.append_said([self.ends[0]])  # TRL cannot take an empty completion; this one is not trained
        return [Episode(track, result) for track, result in zip(tracks, scored, strict=True)]


@contextmanager
def _refusals(play: Play) -> Iterator[None]:
    """Messages that the chat template refuses are the failure of their episode."""
    try:
        yield
    except EnvironmentFailed as error:
        play.failure = Failure("wrong_type", f"said what cannot be shown: {error}", place="The environment")


def refuse_tools_for_strings(tools: Sequence[Any]) -> None:
    """Tools are told to the model by its chat template.

    Raises:
        ConfigError: there are some, and the prompt is a string.
    """
    if tools:
        raise ConfigError(
            "The environment has tools that are methods (get_tools), and prompts that are strings: no chat template\n"
            'shows the model its tools. Let build_dataset return chat messages: [{"role": "user", "content": "..."}]'
        )
