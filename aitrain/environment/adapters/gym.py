"""Environments with gymnasium's `reset` and `step`: `--rl-env gym:FrozenLake-v1`, and GEM's: `--rl-env gem:ID`.

Settings: those of `settings.py`, and `actions`, words for the actions.
"""

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from aitrain.environment.adapters.settings import Games, seed_generators
from aitrain.environment.contract import Score
from aitrain.environment.user_modules import source_files
from aitrain.errors import ConfigError

MOST_INVALID = 3  # answers without an action that end an episode
HIGHLIGHT = re.compile(r"\x1b\[[\d;]*m(.+?)\x1b\[0m")  # coloured text of a terminal, such as the agent's place


@dataclass(eq=False, kw_only=True)
class Gymnasium(Games):
    """One episode of the environment for each case. The score is the sum of its rewards."""

    package = "gymnasium"
    actions: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        env, id, actions = self.make(), self.id, self.actions
        if "ansi" in getattr(env, "metadata", {}).get("render_modes", ()):
            self.arguments = {"render_mode": "ansi", **self.arguments}
        space: Any = getattr(env, "action_space", None)
        kind = type(space).__name__
        if kind not in ("Discrete", "Text", "NoneType"):  # GEM's environments have none, and read text
            raise ConfigError(f"rl_env: {id} has actions of the kind {space}, which no text names")
        numbers = range(space.start, space.start + space.n) if kind == "Discrete" else ()
        if actions and len(actions) != len(numbers):
            raise ConfigError(f"rl_env_config: {id} has {len(numbers)} actions, and `actions` names {len(actions)}")
        named = actions or list(map(str, numbers))
        self.numbers = {word.lower(): number for word, number in zip(named, numbers, strict=True)}
        words = "|".join(map(re.escape, sorted(self.numbers, key=len, reverse=True)))  # `go north` before `go`
        self.pattern = re.compile(rf"(?<![\w-])(?<!\d\.)(?:{words})(?!\w|\.\d)")
        self.instruction = ""  # the environment reads the whole answer
        if named:
            what = f"one of: {', '.join(actions)}" if actions else f"a number from {named[0]} to {named[-1]}"
            self.instruction = f"Answer with {what}."
        self.source_files = source_files((), [getattr(env, "unwrapped", env)], self.package)
        getattr(env, "close", lambda: None)()

    def make(self) -> Any:
        """A new environment of the framework."""
        return import_module(self.package).make(self.id, **self.arguments)

    def episode(self, game_seed: int) -> Generator[str, str, Score]:
        """Play until the environment or a limit ends the episode; the score is the sum of the rewards."""
        total, invalid = 0.0, 0
        seed_generators(game_seed)
        env = self.make()
        seen, info = env.reset(seed=game_seed)
        text = self._shown(env, seen, info)
        try:
            reply = yield f"{text}\n\n{self.instruction}".strip()
            while True:
                named = self.pattern.findall(reply.lower())  # the last action counts
                if self.numbers and not named:
                    if (invalid := invalid + 1) == MOST_INVALID:
                        break
                    reply = yield f"That is no action. {self.instruction}"
                    continue
                action = self.numbers[named[-1]] if self.numbers else reply
                seen, reward, terminated, truncated, info = env.step(action)
                total, text = total + float(reward), self._shown(env, seen, info)
                if terminated or truncated:
                    break
                reply = yield text
        except GeneratorExit:
            pass
        finally:
            getattr(env, "close", lambda: None)()
        return Score(total, {"invalid_actions": float(invalid)})

    def _shown(self, env: Any, seen: object, info: Mapping[str, str]) -> str:
        is_drawn = not isinstance(seen, str) and self.arguments.get("render_mode") == "ansi"
        text = HIGHLIGHT.sub(r"[\1]", str(env.render() if is_drawn else seen)).strip()
        return "\n".join(filter(None, (text, info.get("suffix")))) or "Go on."


class Gem(Gymnasium):
    """Environments of GEM, which read the whole answer and may add a suffix to what they say."""

    package = "gem"
