"""Finds out what a model argument names: a Hub name, a folder, an adapter, a run, a checkpoint or a server's address.

Commands that use a trained model (`aitrain eval`, `compare`, `chat`, `export`, `serve`) read their arguments with
`read_model`, and take over the options of the run that trained it with `run_options`.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from aitrain.errors import ConfigError, did_you_mean
from aitrain.options.environment import named_place
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.options.yaml_text import read_yaml
from aitrain.packages import NAMED_MODELS, TINY, public_base
from aitrain.runs.checkpoint import checkpoints_of, is_named_checkpoint, step_of
from aitrain.runs.heartbeat import state_of
from aitrain.runs.json_values import JsonObject, as_text, read_whole
from aitrain.runs.run_folder import RUNS, RunFolder, read_object

ModelKind = Literal["hub", "folder", "run", "checkpoint", "url"]
ADAPTER_CONFIG = "adapter_config.json"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
LONGEST_LABEL = 60

OWN_OPTIONS = {
    *("project_name", "output_dir", "log"),
    *("push_to_hub", "username", "repo_id", "hub_private"),
    *("resume_from_checkpoint", "resume_anyway"),
}
"""Options of a run that say where it is kept and shown; no later command takes them over."""


@dataclass(frozen=True)
class ModelReference:
    """One model, found but not loaded: the weights are those of `base`, with `adapter` if there is one."""

    given: str
    """The argument as the user wrote it."""
    kind: ModelKind
    base: str
    """Hub name, folder or `tiny` to load; the address of a `url`."""
    adapter: Path | None = None
    run: Path | None = None
    """Folder of the run that trained the model, None if it is not known."""
    step: int | None = None
    """Optimizer step of the weights in that run."""
    name: str | None = None
    """The model's name at a `url`, where it is known."""

    @property
    def label(self) -> str:
        """A short name for tables, which is also the name of a folder."""
        if self.run is not None:
            text = self.run.resolve().name + (f"-step{self.step}" if self.kind == "checkpoint" else "")
        elif self.kind == "url":
            text = self.name.rpartition("/")[2] if self.name else urlsplit(self.base).netloc
        else:
            text = (self.adapter or Path(self.base).expanduser()).resolve().name
        return re.sub(r"[^\w.+-]+", "-", text)[:LONGEST_LABEL].strip("-.") or "model"

    @property
    def facts(self) -> dict[str, Any]:
        """The model as the files of an eval have it."""
        return {**asdict(self), "label": self.label}


def read_model(given: str) -> ModelReference:
    """What an argument names. Only its files are looked at; whether the Hub has a name shows when it is loaded.

    Raises:
        ConfigError: it names nothing that can be loaded.
    """
    if given in NAMED_MODELS:
        return ModelReference(given, "hub", given)
    if given.startswith(("http://", "https://")):
        return _address(given)
    path = Path(os.path.expanduser(given))  # Path's own raises where there is no such user
    if not path.exists() and (Path(RUNS) / given).is_dir():
        path = Path(RUNS) / given
    if path.is_dir():
        return _folder(given, path)
    first, _, rest = given.partition("/")
    if not path.exists() and HUB_NAME.fullmatch(given) and not (rest and Path(first).is_dir()):
        return ModelReference(given, "hub", given)
    parent = path.parent if path.parent.is_dir() else Path()
    near = did_you_mean(path.name, {other.name for other in (*parent.glob("*/"), *Path(RUNS).glob("*"))})
    what = "is a file, not a folder" if path.exists() else "does not exist"
    raise ConfigError(
        f"model: {given} {what}.{near}\nGive a run folder, a model folder, an adapter, a Hub name, or `{TINY}`."
    )


def before_training(reference: ModelReference) -> ModelReference | None:
    """The model that the training began with; None if it is not known."""
    if reference.run is None:
        return read_model(reference.base) if reference.adapter is not None else None
    base = run_options(reference.run).get("model")
    return read_model(base) if isinstance(base, str) else None


def run_options(run: Path | None, names: Collection[str] | None = None) -> dict[str, object]:
    """Options of a run, all or those with these names, for a command that has options of the same names; empty without
    a run.

    Relative paths are those of the folder that the run was last started in.
    """
    if run is None:
        return {}
    folder = RunFolder(run)
    options = {
        name: value
        for name, value in load_options(folder.config).items()
        if name not in OWN_OPTIONS and (names is None or name in names)
    }
    for name in ("model", "chat_template"):
        if isinstance(value := options.get(name), str):
            options[name] = _found_path(folder, value)
    if given := options.get("rl_env"):
        options["rl_env"] = found_places(given, lambda _, place: _found_environment(folder, place))
    return options


def found_places(given: object, find: Callable[[str, str], str]) -> str | list[str]:
    """`rl_env` of a run with the places that `find` returns, given the name of an environment, empty for an only one,
    and its place."""
    if not isinstance(given, list):
        return find("", str(given))
    return [f"{name}={find(name, place)}" for name, place in map(named_place, map(str, given))]


# -- addresses and folders


def _address(given: str) -> ModelReference:
    parts = urlsplit(given)
    if "@" in parts.netloc or parts.query:
        raise ConfigError(
            "model: an address holds no user and no key: it would be written into the run folder\n"
            "Put the key into the environment variable OPENAI_API_KEY."
        )
    return ModelReference(given, "url", given.rstrip("/"))


def _folder(given: str, path: Path) -> ModelReference:
    """A folder with weights, which is known as that of the run that it is in; or a run, with its model/."""
    if _has_model(path):
        place = path.resolve()
        if place.parent.name == "checkpoints" and is_named_checkpoint(place) and _is_run(place.parents[1]):
            return _loaded_from(given, "checkpoint", path, place.parents[1], step_of(place))
        run = next((one for one in place.parents[:2] if place.is_relative_to(one / "model") and _is_run(one)), None)
        return _loaded_from(given, "folder", path, run, _model_step(run) if run else None)
    folder = RunFolder(path)
    if not _has_model(folder.model):
        found = checkpoints_of(folder)
        kinds = "Give a run that has trained, a model folder, an adapter, or a Hub name."
        advice = f"Its newest checkpoint is {found[0]}" if found else kinds
        raise ConfigError(
            f"model: {given} has no model (status {state_of(folder, read_object(folder.status))})\n{advice}"
        )
    return _loaded_from(given, "run", folder.model, path, _model_step(path))


def _has_model(path: Path) -> bool:
    return (path / ADAPTER_CONFIG).is_file() or (path / "config.json").is_file()


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _model_step(run: Path) -> int | None:
    """The optimizer step of the weights in model/."""
    return read_object(RunFolder(run).result).get("model_step")


def _loaded_from(given: str, kind: ModelKind, path: Path, run: Path | None, step: int | None) -> ModelReference:
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model: {path} has no weights in safetensors; a pickle, such as pytorch_model.bin, could run any code\n"
            "Give a folder with .safetensors files, as save_pretrained writes it."
        )
    if (path / ADAPTER_CONFIG).is_file():
        return ModelReference(given, kind, _base_of(path, run), path, run, step)
    return ModelReference(given, kind, str(path), None, run, step)


def _base_of(adapter: Path, run: Path | None) -> str:
    """The base of an adapter: what the run's options name, else what the adapter's own configuration names."""
    named = run_options(run).get("model")
    if isinstance(named, str):
        return named
    recorded = read_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not recorded:
        raise ConfigError(f"model: {adapter / ADAPTER_CONFIG} does not name its base model (base_model_name_or_path)")
    if (own := public_base(recorded)) in NAMED_MODELS:
        return own
    beside = adapter / recorded  # an absolute path is itself
    if not Path(recorded).exists() and beside.is_dir():
        return str(beside)
    if Path(recorded).is_absolute() and not beside.is_dir():
        raise ConfigError(
            f"model: {adapter} is an adapter of {recorded}, which is not there\n"
            f"Put the base there, or write its place into {adapter / ADAPTER_CONFIG} (base_model_name_or_path)."
        )
    return str(recorded)


# -- the options of a run


def _found_path(folder: RunFolder, value: str) -> str:
    """A relative path as that of the folder that the run was started in, if it exists there; any other value
    unchanged."""
    place = Path(as_text(read_object(folder.status).get("directory")), value)
    return str(place) if value not in NAMED_MODELS and place.exists() else value


def _found_environment(folder: RunFolder, value: str) -> str:
    """The environment of a run, with the path of its file, if it is one."""
    file, colon, name = value.partition(":")
    return f"{_found_path(folder, file)}{colon}{name}" if file.endswith(".py") else value


ANSWER_TOKENS = 512
"""Tokens of an answer in a chat, unless --rl-max-new-tokens is given."""


def chat_config(model: str, given: Mapping[str, object]) -> TrainConfig:
    """The options of the run that trained a model, with those that are `given`.

    Raises:
        ConfigError: the model cannot be talked to, or an option is wrong.
    """
    reference = read_model(model)
    if reference.kind == "url":
        raise ConfigError(f"model: {model} is an address; a chat loads the model itself: give its folder or name")
    trained = run_options(reference.run, TrainConfig.model_fields)
    trained.pop("rl_max_episode_tokens", None)  # a conversation has no such limit
    values = {**trained, "rl_max_new_tokens": ANSWER_TOKENS, "model": reference.base, **given}
    return resolve(TrainConfig, None, values)


# -- config.yaml


def read_options(config: Path) -> JsonObject:
    """The content of config.yaml, unchecked; empty if it cannot be read."""
    with suppress(ConfigError):
        return load_options(config)
    return {}


def load_options(config: Path) -> JsonObject:
    """The content of config.yaml.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        loaded = read_yaml(read_whole(config).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {config}: {str(error)[:200]}") from None
    return {str(name): value for name, value in loaded.items()} if isinstance(loaded, dict) else {}
