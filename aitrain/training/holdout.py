"""Splits the dataset into training and held-out cases, at random by a seed.

Rows that look the same to the model stay on the same side.
"""

import hashlib
import math
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from aitrain.environment.contract import Case, asks_nothing
from aitrain.environment.dataset import Datasets, canonical_text
from aitrain.environment.runner import Runner
from aitrain.environment.tools import Tools
from aitrain.errors import ConfigError, errors_of
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat

DEFAULT_EVAL_SHARE = 10
FEWEST_PROMPTS = 8
"""Prompts to hold out by default where a tenth of them are fewer, as long as they are at most two fifths."""
DEFAULT_EVAL_CASES = 64


@dataclass(frozen=True)
class DatasetSplit:
    """Training and held-out cases, and counts of those that were removed."""

    train: list[Case]
    held_out: list[Case]
    """Those whose scores are reported."""
    dropped: int
    overlap: int
    """Held-out cases with the prompt of a training case."""
    choosing: list[Case]
    """With --save-best, the held-out cases that the step is chosen by: the score of the best of several steps is too
    high on the cases that it was chosen by."""

    def __str__(self) -> str:
        others = f", and {len(self.choosing)} to choose the best step by" if len(self.choosing) else ""
        return f"{len(self.train)} cases to train on, {len(self.held_out)} held out{others}"

    def notes(self, limit: int | None) -> Iterator[str]:
        """Notes about the split for the user; `limit` is the maximum tokens of a prompt."""
        if self.dropped:
            yield f"{self.dropped} cases dropped: their prompt has more than {limit} tokens."
        if self.overlap:
            yield (
                f"{self.overlap} of {len(self.held_out)} held-out cases have the same prompt as a training case:"
                " their score does not show what was learned for new prompts."
            )
        if not len(self.held_out):
            yield (
                "No held-out cases, so no score before and after: by default they are a tenth of the cases, without"
                " those that one step needs. --eval-cases N holds out N."
            )


@dataclass(frozen=True)
class PromptLimit:
    """Limit on the tokens of a prompt, including its tool schemas."""

    chat: ChatFormat
    tokens: int | None
    tools: Sequence[dict[str, object]] = ()
    may_open: bool = False
    """Whether the environment may speak first, so that a row alone need not be a whole prompt."""

    def key_of(self, case: Case) -> bytes:
        """Hash of the rendered prompt, or of the row if the prompt is not known before the episode; empty if the prompt
        is too long."""
        if self.is_open(case):
            text = canonical_text(case.row).encode(errors="replace")
        else:
            text = self.chat.prompt_text(case.prompt, self.tools).encode(errors="surrogatepass")
            if self.tokens is not None and self.length_of(case) > self.tokens:
                return b""
        return hashlib.sha256(text).digest()

    def is_open(self, case: Case) -> bool:
        """Whether the environment's opening makes the prompt of this case."""
        return self.may_open and asks_nothing(case.prompt)

    def length_of(self, case: Case) -> int:
        """Tokens of the prompt as far as they are known before the episode."""
        return 0 if self.is_open(case) else len(self.chat.prompt_ids(case.prompt, self.tools))


def prompt_limits(
    runner: Runner, chat: ChatFormat, tokens: int | None, tools: Mapping[str, Tools]
) -> dict[str, PromptLimit]:
    """The limit on prompts of each environment."""
    return {
        name: PromptLimit(chat, tokens, tools[name].schemas, part.kind != "score_episode")
        for name, part in runner.parts.items()
    }


def prompt_limit(config: TrainConfig, context: int | None) -> int | None:
    """Maximum tokens of a prompt: the option, or what the context leaves beside the episode if that is less.

    Raises:
        ConfigError: the episode alone fills the context.
    """
    name = "rl_max_new_tokens" if config.rl_max_episode_tokens is None else "rl_max_episode_tokens"
    episode = config.rl_max_episode_tokens or config.completion_tokens
    room = None if context is None else context - episode
    if room is not None and room < 1:
        raise ConfigError(f"{name}: {episode} new tokens leave no room for a prompt in a context of {context}")
    limits = [limit for limit in (config.rl_max_prompt_length, room) if limit is not None]
    return min(limits) if limits else None


def split(
    built: Datasets, config: TrainConfig, limit: PromptLimit, needed: int = 0, is_eval: bool = False
) -> DatasetSplit:
    """Drop prompts that are too long and hold cases out by the seed; by default only cases that training does not need.
    An eval may ask for as many as there are.

    Raises:
        ConfigError: too few cases to hold out as many as requested.
    """
    everything, own_eval = built
    train = _keys_of(everything, limit)
    dropped, cases, shown = len(everything) - len(train), everything, train
    if own_eval:
        cases, shown = own_eval, _keys_of(own_eval, limit)
        dropped += len(cases) - len(shown)
    plays_all = is_eval and not own_eval and (config.eval_cases or 0) >= len(train)
    if not own_eval and not plays_all:
        held, left_out = _hold_out(_distinct(cases, shown), config, needed)
    else:
        count = len(shown) if config.eval_cases is None else min(config.eval_cases, len(shown))
        held, left_out = set(random.Random(config.seed).sample(list(shown), count)), set[int]()
    choosing, reporting = set[int](), held
    if config.save_best and len(held) > 1 and not plays_all:
        keys = _distinct(cases, {number: shown[number] for number in sorted(held)})
        choosing, others = hold_out(keys, len(held) // 2, len(held) - 1, config.seed)
        reporting = held - choosing - others
    if not own_eval:
        train = {number: key for number, key in train.items() if number not in held | left_out}
    trained = set(train.values())
    return DatasetSplit(
        [everything[number] for number in train],
        [cases[number] for number in sorted(reporting)],
        dropped,
        overlap=sum(shown[number] in trained for number in reporting),
        choosing=[cases[number] for number in sorted(choosing)],
    )


def _keys_of(cases: Sequence[Case], limit: PromptLimit) -> dict[int, bytes]:
    """The prompt hash of each case whose prompt is short enough, by row number."""
    return {number: key for number, key in enumerate(map(limit.key_of, cases)) if key}


def _distinct(cases: Sequence[Case], shown: Mapping[int, bytes]) -> Mapping[int, Hashable]:
    """What tells the cases apart: their prompts; their rows if all prompts are equal, or their numbers."""
    keys: Mapping[int, Hashable] = shown
    if len(set(shown.values())) < 2:
        keys = {number: canonical_text(cases[number].row) for number in shown}
    return keys if len(set(keys.values())) > 1 else {number: number for number in shown}


def _hold_out(keys: Mapping[int, Hashable], config: TrainConfig, needed: int) -> tuple[set[int], set[int]]:
    """Hold out as many cases as asked for, or by default those of a tenth of the prompts."""
    count, prompts = config.eval_cases, len(set(keys.values()))
    if count is not None and count >= max(1, len(keys)):
        raise ConfigError(
            f"eval_cases: cannot hold out {count} of {len(keys)} cases: nothing would be left to train on"
        )
    if count is not None:
        return hold_out(keys, count, len(keys) - 1, config.seed)
    if len(keys) < DEFAULT_EVAL_SHARE:
        return set(), set()
    wanted = max(1, prompts // DEFAULT_EVAL_SHARE, min(FEWEST_PROMPTS, 2 * prompts // 5))
    most = DEFAULT_EVAL_CASES
    if config.save_best:  # so that the half that reports is as large as without
        wanted, most = max(wanted, min(2 * wanted, 2 * prompts // 5)), 2 * most
    return hold_out(keys, min(most, math.ceil(wanted * len(keys) / prompts)), len(keys) - needed, config.seed)


def hold_out(keys: Mapping[int, Hashable], count: int, max_rows: int, seed: int) -> tuple[set[int], set[int]]:
    """Numbers of about `count` rows to hold out, and of those that training loses beside them, as rows with the same
    key stay together.

    Takes whole groups of rows with the same key, those with more than `count` rows last, the others in random order,
    and at most `max_rows` rows in all.
    """
    by_key: dict[Hashable, list[int]] = {}
    for number, key in keys.items():
        by_key.setdefault(key, []).append(number)
    groups, source = list(by_key.values()), random.Random(seed)
    first = source.sample(range(len(groups)), min(count, len(groups)))
    others = sorted(set(range(len(groups))) - set(first))
    source.shuffle(others)
    taken = list[int]()
    for group in sorted((groups[place] for place in (*first, *others)), key=lambda group: max(count, len(group))):
        if len(taken) < count and len(taken) + len(group) <= max_rows:
            taken += group
    return set(taken[:count]), set(taken[count:])


def split_each(
    built: Mapping[str, Datasets],
    config: TrainConfig,
    prompts: Mapping[str, PromptLimit],
    per_step: int,
    is_eval: bool = False,
) -> DatasetSplit:
    """The cases of all environments, each of which holds out as many as it would alone.

    Raises:
        ConfigError: an environment has too few cases for its share of one step, or to hold out as many as requested; in
            an eval, it has none to play.
    """
    parts = list[DatasetSplit]()
    for name, share in config.env_shares.items():
        limit, needed = prompts[name], math.ceil(per_step * share)
        with errors_of(name):
            found = split(built[name], config, limit, needed, is_eval)
            too_long = f"{found.dropped} have a prompt of more than {limit.tokens} tokens"
            if is_eval and not len(found.held_out):
                raise ConfigError(
                    f"eval_cases: no case is held out, {too_long}\n"
                    f"Give their number with --cases; --cases {len(built[name][0])} plays all."
                )
            if not is_eval and len(found.train) < needed:
                raise ConfigError(
                    f"One step needs {needed} prompts, and the cases to train on are {len(found.train)}:"
                    f" {len(found.held_out)} are held out, {too_long}.\n"
                    "Build more cases, hold out fewer (--eval-cases), or take fewer a step (--rl-prompts-per-step)."
                )
        parts.append(found)

    return DatasetSplit(
        list(chain(*(part.train for part in parts))),
        list(chain(*(part.held_out for part in parts))),
        sum(part.dropped for part in parts),
        sum(part.overlap for part in parts),
        list(chain(*(part.choosing for part in parts))),
    )
