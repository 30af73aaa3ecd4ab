"""Checkpoints as files: verified, published and deleted atomically, and compared with the run that resumes.

checkpoints/checkpoint-<step>/
  manifest.json      written last: sha256 of every other file, and the facts of the run
  ...                what the trainer writes (training/trainer_checkpoint.py); nothing here reads it
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from aitrain.errors import CheckpointDamagedError, ConfigError
from aitrain.options.section import options_of
from aitrain.options.train import TrainConfig, pass_dependent
from aitrain.packages import named_folder
from aitrain.redaction import to_jsonable, without_secrets
from aitrain.runs.held_out import Scoring
from aitrain.runs.json_values import JsonObject, as_object
from aitrain.runs.records import RECORD, MetricsLine, RolloutRecord, read_metrics
from aitrain.runs.run_folder import RunFolder, keep_lines, read_object, sync, write_json

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
STAGING = ".saving-"
"""Prefix of folders that are being written or deleted."""
OLD = ".old-"
"""Prefix of what is being replaced."""


@dataclass(frozen=True)
class Manifest:
    """The facts of the run that wrote a checkpoint, and its state."""

    step: int
    config: dict[str, object]
    """The resolved options."""
    environment: dict[str, object]
    """As in environment.json: module, class, file, sha256, config, requires, packages."""
    dataset: str
    """Fingerprint of the training cases."""
    processes: int
    completions: int = 0
    """Completions of an optimizer step; 0 in the manifests of earlier versions."""
    seconds: float = 0.0
    """Seconds of the training, evaluations included, over all parts of a resumed run."""
    held_out: str = ""
    """Fingerprint of the held-out cases."""
    before: dict[str, Scoring] = field(default_factory=dict)
    """The initial policy's scores of these cases by decoding; empty before they were played."""
    last_other: int = 0
    """The last step whose evaluation played other held-out cases, or another number of samples."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every other file of the checkpoint."""


COMPARED_FACTS = {
    "config": "rl_env_config: what the environment was made with",
    "weights": "model: the content of its files with weights",
    "chat_template": "chat_template: the text of the template",
}
"""What of environment.json a resumed run compares, beside class and source, and what is said where it differs."""
OF_THE_STEP = ("batch_size", "gradient_accumulation", "rl_prompts_per_step")
"""Options that the completions of a step follow from, which are compared."""
MANIFEST_TYPE = TypeAdapter(Manifest)


# -- reading


def is_named_checkpoint(folder: Path) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return folder.name.startswith(PREFIX) and folder.name.removeprefix(PREFIX).isdigit() and folder.is_dir()


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_of(folder: RunFolder) -> list[Path]:
    """A run's checkpoints, whole or not, by their step, the newest first."""
    found = folder.checkpoints.glob(f"{PREFIX}*") if os.path.isdir(folder.checkpoints) else ()  # no error for odd names
    return sorted(filter(is_named_checkpoint, found), key=step_of, reverse=True)


def has_steps(folder: RunFolder) -> bool:
    """Whether a step of the run was logged or saved."""
    return any(True for _ in read_metrics(folder.metrics)) or bool(checkpoints_of(folder))


def newest_checkpoint(folder: RunFolder, notify: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint; `notify` gets a note for each newer one that is damaged."""
    for checkpoint in checkpoints_of(folder):
        damage = damage_of(checkpoint)
        if not damage:
            return checkpoint
        notify(f"{checkpoint} is skipped: {damage}")
    return None


def damage_of(checkpoint: Path) -> str:
    """The damage of a checkpoint in a few words; empty if it is whole. Reads every byte."""
    try:
        files = read_manifest(checkpoint).files
    except CheckpointDamagedError as error:
        return str(error)
    there = _files(checkpoint)
    del there[MANIFEST]
    wrong = sorted(files.keys() ^ there.keys())  # first, as a foreign one may be a link to nothing, or a pipe
    wrong = wrong or [name for name, digest in _digests_of(there).items() if digest != files[name]]
    return f"{wrong[0]} is missing, was changed or does not belong to it" if wrong else ""


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointDamagedError: the manifest is missing or was changed.
    """
    try:
        manifest = MANIFEST_TYPE.validate_python(read_object(checkpoint / MANIFEST))
    except ValueError:
        raise CheckpointDamagedError(f"{MANIFEST} is missing or was changed") from None
    if manifest.step != step_of(checkpoint):
        raise CheckpointDamagedError(f"{MANIFEST} is that of step {manifest.step}")
    return manifest


def _files(folder: Path) -> dict[str, Path]:
    """All files below a folder, by their relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix(): path for path in files}


def _digests_of(files: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of files by their names, four at a time."""

    def digest_of(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(files, pool.map(digest_of, files.values()), strict=True))


# -- writing


def seal(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, after all of its other files."""
    whole = replace(manifest, files=_digests_of(_files(folder)))
    sync_all(folder)
    write_json(folder / MANIFEST, asdict(whole))


def publish(made: Path, place: Path) -> None:
    """Sync a finished folder and rename it. A folder that has the name already is kept until then; after a kill,
    `clean_partial` restores it."""
    sync_all(made)
    old = place.with_name(f"{OLD}{place.name}")
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    made.rename(place)
    sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_all(folder: Path) -> None:
    """Make all files below a folder survive a power cut."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(sync, [folder, *folder.rglob("*")]))


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a kill leaves no damaged checkpoint."""
    gone = checkpoint.with_name(f"{STAGING}{checkpoint.name}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def rotate(folder: RunFolder, limit: int | None, best: int | None) -> None:
    """Delete the oldest checkpoints beyond the limit; that of the best step is kept in addition."""
    others = [checkpoint for checkpoint in checkpoints_of(folder) if step_of(checkpoint) != best]
    for checkpoint in others[limit:] if limit else []:
        delete(checkpoint)


def rewind(folder: RunFolder, to: Manifest) -> None:
    """Delete newer checkpoints, and then the records that came after this one: a resumed run writes them again."""
    for checkpoint in checkpoints_of(folder):
        if step_of(checkpoint) > to.step:
            delete(checkpoint)
    keep_lines(folder.metrics, lambda line: line.step <= to.step, MetricsLine.from_json)
    scored = any(line.is_scoring and line.step == to.step for line in read_metrics(folder.metrics))
    repeated = ("after",) if scored else ("after", "step")  # evaluations that follow the save

    def stays(record: RolloutRecord) -> bool:
        return record.step < to.step or (record.step == to.step and not record.eval_phase.startswith(repeated))

    for file in folder.rollout_files:
        keep_lines(file, stays, RECORD.validate_json)


def forget(folder: RunFolder) -> None:
    """Delete the records of a run that was ended before its first checkpoint, and starts from the beginning."""
    shutil.rmtree(folder.rollouts, ignore_errors=True)
    for file in (folder.metrics, folder.diagnostics):
        file.unlink(missing_ok=True)


def clean_partial(folder: RunFolder) -> None:
    """Remove the unfinished folders of a killed process, and restore those that it was replacing."""
    for place in (folder.path, folder.checkpoints):
        for old in place.glob(f"{OLD}*"):
            whole = old.with_name(old.name.removeprefix(OLD))
            shutil.rmtree(old) if whole.exists() else old.rename(whole)
        for unfinished in place.glob(f"{STAGING}*"):
            shutil.rmtree(unfinished)


# -- resuming


def changed_options(before: Manifest, config: TrainConfig, processes: int, completions: int) -> list[str]:
    """Changed options that affect the training, as `lr: 1e-05 -> 0.001`. A step is the same if it has as many
    completions, however many of them share a forward pass.

    Options that the environment declared before, and that are not given now, are compared when it has been loaded.
    """
    completed = before.completions or completions
    old = {**before.config, "completions_per_step": completed, "processes": before.processes}
    new = {**to_jsonable(config.written()), "completions_per_step": completions, "processes": processes}
    safe = {option.name for option in options_of(type(config)) if option.resume_safe} | {*OF_THE_STEP}
    safe |= as_object(before.environment.get("requires")).keys() - config.model_fields_set
    if pass_dependent(config):
        safe -= {"batch_size"}
    names = [name for name in {**old, **new} if name not in safe]
    changes = [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]
    return [f"{name}: {_shown(name, one)} -> {_shown(name, other)}" for name, one, other in changes]


def changed(before: Manifest, now: Manifest, config: TrainConfig) -> list[str]:
    """Changes of options, environment and training cases, each in a few words."""
    changes = changed_options(before, config, now.processes, now.completions)
    old, new = before.environment, to_jsonable(now.environment)
    if old["class"] != new["class"]:
        changes.append(f"environment: {old['class']} -> {new['class']}")
    elif _sources(old) != _sources(new):
        changes.append(f"environment: {new.get('file') or new['class']} has changed")
    for fact, what in COMPARED_FACTS.items():
        if old.get(fact, new[fact]) != new[fact]:
            changes.append(f"{what} has changed")
    if before.dataset != now.dataset:
        changes.append("dataset: other training cases, of the environment or by eval_cases")
    return changes


def _sources(facts: JsonObject) -> list[object]:
    """Hashes and packages of the environment's source, or of those of several."""
    several = as_object(facts.get("environments")).values()
    return [facts["sha256"], facts.get("package"), *(as_object(one).get("sha256") for one in several)]


def _shown(name: str, value: object) -> str:
    return "unset" if value is None else str(without_secrets({name: value})[name])


def weights_stamp(model: str) -> list[str]:
    """Names and digests of the files with weights in a model's folder, to see that they have changed; empty for a model
    of the Hub. A digest is that of parts of the file: a training changes all of it."""
    stamp = list[str]()
    for file in sorted((named_folder(model) or Path(model).expanduser()).glob("*.safetensors")):
        digest = hashlib.sha256()
        size = file.stat().st_size
        with file.open("rb") as stream:
            for start in range(0, size, size // 64 + 1):
                stream.seek(start)
                digest.update(stream.read(4096))
        stamp.append(f"{file.name} {digest.hexdigest()}")
    return stamp


def refuse_changes(checkpoint: Path, changes: list[str]) -> None:
    """Refuse to resume with these changes; no-op if there are none.

    Raises:
        ConfigError: something changed.
    """
    if changes:
        raise ConfigError(
            f"resume_from_checkpoint: this is not the run that wrote {checkpoint}\n{'; '.join(changes[:3])}"
            "\nRestore it, or pass --resume-anyway to continue without exact reproducibility."
        )
