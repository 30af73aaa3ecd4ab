"""The model card, model/README.md: base model, environment, scores, and the command that makes the model again.

Names, paths and versions are escaped, so that they contain no Markdown or HTML.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from aitrain.errors import ConfigError
from aitrain.options.reading import as_command, resolve
from aitrain.options.train import TrainConfig
from aitrain.packages import NAMED_MODELS
from aitrain.redaction import redact, without_secrets
from aitrain.runs.held_out import recorded_table, table_texts
from aitrain.runs.run_folder import RunFolder, write_text
from aitrain.ui.dashboard import reward_line
from aitrain.ui.output import escape_controls
from aitrain.ui.overview import Overview, short_name


def try_to_write_card(folder: RunFolder, place: Path | None = None) -> str | None:
    """Write the card of a run that has a result and a model: into model/, or into `place`, an export of that model.
    Returns an error message if that fails, as the run must not fail with it."""
    try:
        _write_card(folder, place or folder.model)
    except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
        return f"The model card could not be written: {type(error).__name__}: {error}"
    return None


def _write_card(folder: RunFolder, place: Path) -> None:
    overview = Overview(folder.path)
    config = resolve(TrainConfig, folder.config)
    header = _front_matter(place, config.model)
    text = "\n\n".join([header, *_sections(overview, place, config)])
    write_text(place / "README.md", redact(text) + "\n")


def _is_adapter(place: Path) -> bool:
    return (place / "adapter_config.json").exists()


def _front_matter(place: Path, base: str) -> str:
    """The card's YAML header for the Hub, without the base model if that is a local folder."""
    from huggingface_hub.repocard_data import ModelCardData  # takes as long as the rest of the card

    is_adapter = _is_adapter(place)
    is_on_hub = base not in NAMED_MODELS and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) and not Path(base).exists()
    data = ModelCardData(
        base_model=base if is_on_hub else None,
        base_model_relation=("adapter" if is_adapter else "finetune") if is_on_hub else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["aitrain", "grpo", "trl", "reinforcement-learning", *(["lora"] if is_adapter else [])],
    )
    return f"---\n{data.to_yaml()}\n---"


def _sections(overview: Overview, place: Path, config: TrainConfig) -> Iterator[str]:
    result = overview.result
    yield f"# {escaped(config.project_name)}"
    environment = escaped(result.get("environment"))
    yield f"{escaped(short_name(config.model))}, trained with GRPO on the environment {environment} by aitrain."
    if _is_adapter(place):
        merged = ", `merged/` holds base and adapter as one model" if (place / "merged").exists() else ""
        yield f"The LoRA adapter lies here{merged}."
    elif config.peft:
        yield "The LoRA adapter is merged into the base: this is a whole model."
    rows = table_texts(recorded_table(result.get("scores")) or {})
    samples = result.get("eval_samples") or 1
    each = f", {samples} samples each" if samples != 1 else ""
    head = (f"held-out score, {result.get('eval_cases')} cases{each}", "before", "after", "change")
    yield table([head, *rows]) if rows else "No held-out cases were scored."
    about = ["In brackets: 95% intervals over the held-out cases."] if rows else []
    if chosen := overview.selection:
        about.append(
            f"This is the model after step {chosen['step']}, chosen by its held-out score, {chosen['score']:.3f}, the"
            f" best of {chosen['scorings']}. The table's score after training is of"
            f" {'other cases' if chosen['cases'] else 'new samples'}."
        )
    if result.get("eval_overlap"):
        about.append(f"{result['eval_overlap']} of the held-out cases have the same prompt as a training case.")
    yield " ".join(about)
    if len(overview.rewards) > 1:
        yield "Reward over the steps of the training:"
        yield fenced(reward_line(overview.rewards).plain)
    yield "## How it was made"
    yield table([("", ""), *((name, escaped(value)) for name, value in _facts(overview, config) if value)])
    yield _again(overview, config)


def _facts(overview: Overview, config: TrainConfig) -> Iterator[tuple[str, object]]:
    made, result = overview.environment, overview.result
    packages, gpus = made.get("packages"), made.get("gpus")
    for one in (made.get("environments") or {"": made}).values():
        yield "environment", ".".join(str(one[name]) for name in ("module", "class") if one.get(name))
        yield "its file", f"{Path(str(one['file'])).name}, SHA-256 {one.get('sha256')}" if one.get("file") else ""
        yield "its package", one.get("package")
    given = config.rl_env_config
    yield "its configuration", json.dumps(without_secrets(given), ensure_ascii=False) if given else ""
    yield "git commit", made.get("git_commit")
    yield "cases", f"{result.get('train_cases')} for training, {result.get('eval_cases')} held out"
    yield "training", f"{result.get('steps')} steps, {result.get('seconds', 0):.0f} seconds, {result.get('status')}"
    yield "seed", str(config.seed)
    yield "versions", ", ".join(f"{name} {version}" for name, version in (packages or {}).items())
    yield "Python", made.get("python")
    yield "hardware", ", ".join(map(str, gpus or [])) or f"{made.get('cpus')} CPU cores"


def _again(overview: Overview, config: TrainConfig) -> str:
    """How to repeat the run; of files and folders of this machine the names alone."""
    shown: dict[str, object] = {
        name: short_name(value) for name, value in config.changed().items() if isinstance(value, str)
    }
    shown |= without_secrets({"rl_env_config": config.rl_env_config, "trl": config.trl})
    if isinstance(config.rl_env, list):  # of places, which may have names
        shown["rl_env"] = ["=".join(map(short_name, place.split("=", 1))) for place in config.rl_env]
    command = fenced(shlex.join(as_command(config.model_copy(update=shown), "aitrain", "grpo")), "bash")
    if config.rl_env or config.rl_env_module:
        return f"To repeat it:\n\n{command}"
    environment = escaped(overview.environment.get("class"))
    return f"It was started from Python, with an object of {environment}; its options:\n\n{command}"


# -- Markdown


def escaped(value: object) -> str:
    """A value's text on one line, with Markdown and HTML escaped."""
    line = " ".join(escape_controls(str(value)).split())
    html = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#+!|~$@:-])", r"\\\1", html)


def fenced(text: str, language: str = "") -> str:
    """A code block with a fence longer than any in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{escape_controls(text)}\n{fence}"


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * (head.replace("\\|", "").count("|") - 1), *rest])
