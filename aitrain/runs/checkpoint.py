"""A checkpoint as files: whether it is whole, what it was made of, and how it comes and goes in one piece.

checkpoints/checkpoint-<step>/
  manifest.json      written last: every other file with its size and sha256, and what the run was
  ...                what the trainer needs to go on

Nothing here needs torch, and nothing here reads what is in the other files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from aitrain.errors import CheckpointDamagedError, ConfigError
from aitrain.options.option import options_of
from aitrain.options.train import TrainConfig
from aitrain.redaction import without_secrets
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.runs.run_folder import RunFolder, forget, sync, to_json_object, write_json

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
STAGING = ".saving-"
"""What lies in a folder of such a name is not finished."""
OLD, GONE = ".old-", ".gone-"
"""What is being replaced, and what is being deleted."""


@dataclass(frozen=True)
class Best:
    """The best score of the held-out cases so far: after which step, and what it was (0 to 1)."""

    step: int
    score: float
    greedy: float | None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint was made of."""

    step: int
    config: dict[str, object]
    """The resolved options."""
    environment: dict[str, object]
    """As in environment.json: module, class, file, sha256, config."""
    dataset: str
    """Fingerprint of the training cases."""
    processes: int
    versions: dict[str, str]
    best: Best | None = None
    owes_evaluation: bool = False
    """Whether held-out cases were due after this step, and the run was stopped instead."""


# -- reading


def is_named_checkpoint(folder: Path) -> bool:
    """Whether a folder is called like a checkpoint."""
    return folder.name.startswith(PREFIX) and folder.name.removeprefix(PREFIX).isdigit() and folder.is_dir()


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_of(folder: RunFolder) -> list[Path]:
    """A run's checkpoints by their step, whole or not, the newest one first; times of files say nothing."""
    found = folder.checkpoints.glob(f"{PREFIX}*") if os.path.isdir(folder.checkpoints) else ()  # no error for odd names
    return sorted(filter(is_named_checkpoint, found), key=step_of, reverse=True)


def newest_checkpoint(folder: RunFolder, notify: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint; `notify` gets a note for each newer one that is damaged."""
    for checkpoint in checkpoints_of(folder):
        damage = damage_of(checkpoint)
        if not damage:
            return checkpoint
        notify(f"{checkpoint} is skipped: {damage}")
    return None


def damage_of(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, in a few words; empty if it is whole. Reads every byte."""
    try:
        check_whole(checkpoint)
    except CheckpointDamagedError as error:
        return str(error)
    return ""


def check_whole(checkpoint: Path) -> None:
    """Every byte of it is read.

    Raises:
        CheckpointDamagedError: which file is missing, foreign, or not what was written.
    """
    _check_files(checkpoint, _content(checkpoint)["files"])


def read_manifest(checkpoint: Path) -> Manifest:
    """What it was made of.

    Raises:
        CheckpointDamagedError: the manifest is missing, or not what was written.
    """
    content = _content(checkpoint)
    known = {field.name: content[field.name] for field in fields(Manifest)}
    return Manifest(**known | {"best": content["best"] and Best(**content["best"])})


def _content(checkpoint: Path) -> dict[str, Any]:
    try:
        content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        is_as_written = content.pop("sha256") == _digest(content)
        step = content["step"]
    except FileNotFoundError:
        raise CheckpointDamagedError(
            f"it has no {MANIFEST}: it was not written to its end, or not by aitrain"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_as_written, step = False, None
    if not is_as_written:
        raise CheckpointDamagedError(f"{MANIFEST} is not what was written")
    if step != step_of(checkpoint):
        raise CheckpointDamagedError(f"{MANIFEST} is that of step {step}")
    return dict(content)


def _check_files(checkpoint: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    there = {name: path for name, path in _files(checkpoint) if name != MANIFEST}
    if missing := sorted(files.keys() - there.keys()):
        raise CheckpointDamagedError(f"{missing[0]} is missing")
    if foreign := sorted(there.keys() - files.keys()):
        raise CheckpointDamagedError(f"{foreign[0]} is none of its files")
    for name, path in there.items():
        size, wanted = path.stat().st_size, files[name]["size"]
        if size != wanted:
            raise CheckpointDamagedError(f"{name} has {size} bytes, and had {wanted}")
    with ThreadPoolExecutor(4) as pool:
        for name, digest in zip(there, pool.map(_digest_of, there.values()), strict=True):
            if digest != files[name]["sha256"]:
                raise CheckpointDamagedError(f"{name} is not what was written (its sha256 differs)")


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Everything below a folder that is no folder, by its path from there."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix(), path


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# -- writing


def seal(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, after all of its files."""
    files = dict(_files(folder))
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(_digest_of, files.values()))
    sizes = [path.stat().st_size for path in files.values()]
    named = zip(files, sizes, digests, strict=True)
    content = to_json_object(
        {**asdict(manifest), "files": {name: {"size": size, "sha256": digest} for name, size, digest in named}}
    )
    _sync_all(folder)
    write_json(folder / MANIFEST, {**content, "sha256": _digest(content)})


def publish(made: Path, place: Path) -> None:
    """Sync a finished folder and give it its name. What had the name before is there until then, where
    `clean_partial` finds it."""
    _sync_all(made)
    old = place.with_name(f"{OLD}{place.name}")
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    made.rename(place)
    sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(sync, [folder, *folder.rglob("*")]))


def delete(checkpoint: Path) -> None:
    """Take a checkpoint away: it loses its name first, so that half of it is never taken for a damaged one."""
    gone = checkpoint.with_name(f"{GONE}{checkpoint.name}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def rotate(folder: RunFolder, limit: int | None, best: Best | None) -> None:
    """Delete the oldest checkpoints beyond the limit; the best one is kept besides."""
    others = [checkpoint for checkpoint in checkpoints_of(folder) if best is None or step_of(checkpoint) != best.step]
    for checkpoint in others[limit:] if limit else []:
        delete(checkpoint)


def rewind(folder: RunFolder, to: Manifest) -> None:
    """Forget what came after a checkpoint. Newer ones go first: none may stay when its history is gone."""
    for checkpoint in checkpoints_of(folder):
        if step_of(checkpoint) > to.step:
            delete(checkpoint)
    forget(folder.metrics, lambda values: _line_stays(to, MetricsLine.from_json(values)))
    for file in folder.rollouts.glob("*.jsonl"):
        forget(file, lambda values: _record_stays(to, RolloutRecord.from_json(values)))


def _line_stays(to: Manifest, line: MetricsLine) -> bool:
    """Of the checkpoint's own step, a scoring that it owes comes again."""
    return line.step < to.step or (line.step == to.step and not (to.owes_evaluation and line.is_scoring))


def _record_stays(to: Manifest, record: RolloutRecord) -> bool:
    """Of the checkpoint's own step, what follows the save comes again: the scoring at the end, or one that it owes."""
    comes_again = record.eval_phase.startswith(("after", "step") if to.owes_evaluation else "after")
    return record.step < to.step or (record.step == to.step and not comes_again)


def clean_partial(folder: RunFolder) -> None:
    """Take away what a killed process left half done, and put back what it was replacing."""
    for place in (folder.path, folder.checkpoints):
        for old in place.glob(f"{OLD}*"):
            whole = old.with_name(old.name.removeprefix(OLD))
            if not whole.exists():
                old.rename(whole)
    for unfinished in folder.unfinished():
        unfinished.unlink()
    for place in (folder.path, folder.checkpoints):
        for unfinished in [path for kind in (STAGING, OLD, GONE) for path in place.glob(f"{kind}*")]:
            shutil.rmtree(unfinished)


# -- going on from one


def changed_options(before: Manifest, config: TrainConfig, processes: int) -> list[str]:
    """Each option that changes the training and is not what it was, as `lr: 1e-05 -> 0.001`."""
    old, new = _flat(before.config), _flat(to_json_object(config.written()))
    old["processes"], new["processes"] = before.processes, processes
    free = {option.name for option in options_of(type(config)) if option.resume_safe}
    names = [name for name in {**old, **new} if name.partition(".")[0] not in free]
    in_both = {"gradient_accumulation"}  # derived, where it is not written
    return [
        f"{name}: {_shown(name, old.get(name))} -> {_shown(name, new.get(name))}"
        for name in names
        if old.get(name) != new.get(name) and not (name in in_both and (name not in old or name not in new))
    ]


def changed(before: Manifest, now: Manifest, config: TrainConfig) -> list[str]:
    """Options, environment and training cases that are not what they were, each in a few words."""
    changes = changed_options(before, config, now.processes)
    old, new = before.environment, to_json_object(now.environment)
    if old["class"] != new["class"]:
        changes.append(f"environment: {old['class']} -> {new['class']}")
    elif old["sha256"] != new["sha256"]:
        changes.append(f"environment: {new['file']} has changed")
    if old["config"] != new["config"]:
        changes.append(f"rl_env_config: {old['config']} -> {new['config']}")
    if before.dataset != now.dataset:
        held_out = [_shown("eval_cases", count) for count in (before.config.get("eval_cases"), config.eval_cases)]
        is_split_alike = held_out[0] == held_out[1]
        why = "the environment builds other training cases than it did"
        other_split = f"other training cases, with eval_cases {' -> '.join(held_out)}"
        changes.append(f"dataset: {why if is_split_alike else other_split}")
    return changes


def _flat(config: Mapping[str, object]) -> dict[str, object]:
    """The fields of TRL beside the options."""
    given = config.get("trl")
    fields_of_trl = given if isinstance(given, dict) else {}
    options_alone = {name: value for name, value in config.items() if name != "trl"}
    return {**options_alone, **{f"trl.{name}": value for name, value in fields_of_trl.items()}}


def _shown(name: str, value: object) -> str:
    return "unset" if value is None else str(without_secrets({name: value})[name])


def refuse_changes(checkpoint: Path, changes: list[str]) -> None:
    """Nothing, when there are none.

    Raises:
        ConfigError: the run would go on as another one.
    """
    if not changes:
        return
    shown = changes if len(changes) <= 3 else [*changes[:2], f"and {len(changes) - 2} more"]
    raise ConfigError(
        f"resume_from_checkpoint: this is not the run that wrote {checkpoint}\n"
        + "; ".join(shown)
        + "\nRestore it, or pass --resume-anyway to continue without exact reproducibility."
    )
