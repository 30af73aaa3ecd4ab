"""What a chat is about: the model, the options of its run, and how it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aitrain.errors import ConfigError
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.runs.model_reference import before_training, read_model, run_options


@dataclass(frozen=True)
class ChatSetup:
    """A chat that can begin, as `aitrain chat` sends it to its process as JSON."""

    model: str
    options: dict[str, object]
    """Options of a run, for sampling."""
    only: str | None = None
    """`base` or `tuned`; None for both."""
    system: str = ""
    greedy: bool = False
    seed: int = 0
    as_json: bool = False
    answer_tokens: int | None = None
    """Maximum tokens of an answer, if the user has set it."""

    @property
    def config(self) -> TrainConfig:
        """The options, checked."""
        return resolve(TrainConfig, None, self.options)


def chat_options(model: str, only: str | None, given: Mapping[str, object]) -> dict[str, object]:
    """The options of the run that trained a model, with those that are `given`.

    Raises:
        ConfigError: the model cannot be talked to, or there is no base to talk to.
    """
    reference = read_model(model)
    if only not in (None, "base", "tuned"):
        raise ConfigError(f"only: must be base or tuned, not {only}")
    if reference.kind == "url":
        raise ConfigError(f"model: {model} is an address; a chat loads the model itself: give its folder or name")
    if only == "base" and before_training(reference) is None:
        raise ConfigError(f"only: it is not known what {model} was trained from")
    trained = {name: value for name, value in run_options(reference).items() if name in TrainConfig.model_fields}
    return {**trained, "model": reference.base, **given}
