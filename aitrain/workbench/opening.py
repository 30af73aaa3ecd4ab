"""Constructs an environment and builds its datasets, for the commands of `aitrain env`; and writes a new environment
with its test from a template.
"""

import keyword
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aitrain.environment.contract import Case, check_contract
from aitrain.environment.dataset import build_cases, columns
from aitrain.environment.loader import load_env
from aitrain.environment.requirements import with_requirements
from aitrain.environment.runner import AbsentModel, EnvRunner, start_runner
from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.packages import installed

NO_MODEL = (
    "a training with --rl-env-isolation thread has it, and env play --model; an environment that asks it cannot be"
    " served"
)


@dataclass(frozen=True)
class OpenedEnvironment:
    """An environment that can be played, with its cases."""

    runner: EnvRunner
    """It has the environment, and the options with what it requires."""
    cases: Sequence[Case]
    held_out: Sequence[Case] = ()
    """Cases of build_eval_dataset; empty without that method."""
    note: str = ""
    """What the environment requires of a run; empty if nothing."""
    set_by_init: frozenset[str] = frozenset()
    """Names of the attributes that it had before its datasets were built."""

    @property
    def all_cases(self) -> list[Case]:
        """The cases of both datasets, by their numbers."""
        return [*self.cases, *self.held_out]


def open_environment(config: TrainConfig, tokenizer: object, environment: object = None) -> OpenedEnvironment:
    """Construct the environment of the options, unless an object is given, build its datasets, and start the processes
    that it runs in.

    Raises:
        AitrainError: it cannot be constructed, or a dataset or the methods' parameters are wrong.
    """
    environment = load_env(config) if environment is None else environment
    config, note = with_requirements(config, environment)
    attributes = frozenset(getattr(environment, "__dict__", ()))
    cases, held_out = built = build_cases(environment, tokenizer)
    check_contract(environment, columns(built))
    runner = start_runner(environment, config)
    runner.offer(AbsentModel(why=NO_MODEL), tokenizer)
    return OpenedEnvironment(runner, cases, held_out, note, attributes)


# -- a new one

TEMPLATES = Path(__file__).parent / "templates"
"""KIND.py.txt and its test, KIND_test.py.txt."""

RESERVED = {"aitrain", "conftest", "envs", "setup", "test"}
"""Names that are not installed modules, but mean something to aitrain or to pytest."""


def write_environment(name: str, kind: str, folder: Path) -> tuple[Path, Path]:
    """Write NAME.py and test_NAME.py into the folder; returns them.

    Raises:
        ConfigError: the name cannot be a module's, or would hide one; or one of the files exists.
    """
    is_name = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith(("_", "test_"))
    if not is_name or name in {*RESERVED, *sys.stdlib_module_names} or installed(name) is not None:
        raise ConfigError(
            f"NAME: {name} is not the name of a new Python module\nTake another one, such as: aitrain env init my_task"
        )
    files = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in (*files, folder / name):
        if path.exists():
            raise ConfigError(f"{path.name} exists here, and is left as it is\nTake another name.")
    for path, template in zip(files, (f"{kind}.py.txt", f"{kind}_test.py.txt"), strict=True):
        text = (TEMPLATES / template).read_text(encoding="utf-8").replace("my_environment", name)
        path.write_text(text.replace("MyEnvironment", name.title().replace("_", "")), encoding="utf-8")
    return files
