"""How much of a run its command shows: `--quiet`, `--verbose`, `--debug`."""

from __future__ import annotations

from dataclasses import dataclass

from aitrain.errors import ConfigError


@dataclass(frozen=True)
class Verbosity:
    """How much of a run its command shows. Quiet and verbose at the same time raise ConfigError."""

    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    as_json: bool = False
    """Events as JSON lines on standard output, instead of a screen."""

    def __post_init__(self) -> None:
        if self.as_json and (self.quiet or self.verbose):
            raise ConfigError("--json: leave out --quiet and --verbose, which are about the screen")
        if self.quiet and self.verbose:
            raise ConfigError("--quiet and --verbose: give one of them")
