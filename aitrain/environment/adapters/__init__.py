"""Environments of other frameworks as ours: the table of adapters, each imported when `--rl-env NAME:ID` names it.

The module of an adapter imports its framework inside functions only, so that its keywords can be checked without it.
"""

from dataclasses import dataclass

from aitrain.errors import ConfigError
from aitrain.packages import version_of


@dataclass(frozen=True)
class Adapter:
    """One adapter: what it makes an environment of, and the package that it needs."""

    name: str
    module: str
    class_name: str
    example: str
    """An id, for messages."""
    package: str | None = None
    """Distribution of the framework; None if the adapter needs none, as those by URL."""
    versions: str = ""
    """Versions of the package that were tested; also those of aitrain's extra of the adapter's name."""
    by_url: bool = False
    """Whether the environment runs in a server of its own; otherwise in processes of the run."""

    def require_package(self) -> None:
        """Check the installed package without importing it.

        Raises:
            ConfigError: it is not installed, or in a version that the adapter does not work with.
        """
        if self.package is None:
            return
        from packaging.specifiers import SpecifierSet

        found = version_of(self.package)
        if found is None or not SpecifierSet(self.versions).contains(found, prereleases=True):
            raise ConfigError(
                f"rl_env: {self.name} needs {self.package} {self.versions}, and {found or 'none'} is installed\n"
                f'Install it with: pip install "aitrain[{self.name}]"'
            )


_ROOM = "aitrain.environment.adapters"

ADAPTERS = {
    adapter.name: adapter
    for adapter in (
        Adapter(
            "reasoning-gym", f"{_ROOM}.reasoning_gym", "ReasoningGym",
            "chain_sum", "reasoning-gym", ">=0.1.25,<0.2",
        ),
        Adapter(
            "textarena", f"{_ROOM}.textarena", "TextArena",
            "GuessTheNumber-v0", "textarena", ">=0.7.4,<0.8",
        ),
        Adapter(
            "gym", f"{_ROOM}.gym", "Gymnasium",
            "FrozenLake-v1", "gymnasium", ">=1.0,<2",
        ),
        Adapter(
            "gem", f"{_ROOM}.gym", "Gem",
            "game:GuessTheNumber-v0-easy", "gem-llm", ">=0.1,<0.2",
        ),
        Adapter(
            "trl", f"{_ROOM}.trl", "TRLEnvironment",
            "my_envs.py:Counter",
        ),
        Adapter(
            "reward", f"{_ROOM}.reward", "RewardFunctions",
            "my_rewards.py:exact,short",
        ),
        Adapter(
            "rows", f"{_ROOM}.rows", "JudgedRows",
            "train.jsonl",
        ),
        Adapter(
            "verifiers", f"{_ROOM}.verifiers", "Verifiers",
            "my_verifiers_env", "verifiers", ">=0.3.1,<0.5",
        ),
        Adapter(
            "inspect", f"{_ROOM}.inspect", "InspectTask",
            "inspect_evals/agentdojo", "inspect-ai", ">=0.3.285,<0.4",
        ),
        Adapter(
            "openenv", f"{_ROOM}.openenv", "OpenEnv",
            "http://127.0.0.1:8000", "websockets", ">=15", by_url=True,
        ),
        Adapter(
            "ors", f"{_ROOM}.ors", "OpenRewardServer",
            "http://127.0.0.1:8080", by_url=True,
        ),
        Adapter(
            "nemo-gym", f"{_ROOM}.nemo_gym", "NeMoGym",
            "http://127.0.0.1:8000", by_url=True,
        ),
    )
}  # fmt: skip
"""All adapters by name."""

SERVED = Adapter(
    "http", "aitrain.environment.served_environment", "connect",
    "//127.0.0.1:8000", by_url=True,
)  # fmt: skip
"""What loads an environment that is named by its URL; not one of ADAPTERS, as nothing precedes the URL."""


def adapter_named(name: str) -> Adapter | None:
    """The adapter of a name; `_` and `-` are the same."""
    return ADAPTERS.get(name.replace("_", "-"))
