"""The model card, model/README.md: base model, environment, scores, and the command that makes the model again.

Names, paths and versions are escaped, so that they contain no Markdown or HTML.
"""

import json
import re
from pathlib import Path

from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.packages import public_base
from aitrain.redaction import redact, without_secrets
from aitrain.runs.held_out import recorded_table, table_texts
from aitrain.runs.run_folder import RunFolder, write_text
from aitrain.ui.dashboard import reward_line
from aitrain.ui.output import escape_controls
from aitrain.ui.overview import Overview
from aitrain.ui.page import asset

FOLDERS = re.compile(r"(?<![\w.:/])[/~][^:\"']*/")
"""Matches the folders of this machine in an option, but not an address."""


def try_to_write_card(folder: RunFolder, place: Path | None = None) -> str | None:
    """Write the card of a run that has a result and a model: into model/, or into `place`, an export of that model.
    Returns an error message if that fails, as the run must not fail with it."""
    place = place or folder.model
    try:
        text = card_text(Overview(folder.path), place, resolve(TrainConfig, folder.config))
        write_text(place / "README.md", redact(text) + "\n")
    except Exception as error:
        return f"The model card could not be written: {type(error).__name__}: {error}"
    return None


def card_text(overview: Overview, place: Path, config: TrainConfig) -> str:
    """The card of a run whose model is in a folder."""
    from jinja2 import Environment, FunctionLoader  # here, because nothing else of a training needs them
    from markupsafe import Markup

    is_adapter = (place / "adapter_config.json").exists()
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", config.model) and not Path(config.model).exists()
    changed = without_secrets(config.changed())
    options = (f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in changed.items())
    templates = Environment(
        loader=FunctionLoader(asset),
        trim_blocks=True,
        finalize=lambda value: str(value) if isinstance(value, Markup) else escaped(value),
    )
    text: str = templates.get_template("card.md").render(
        base=config.model if is_on_hub else "",
        config=config,
        model=public_base(config.model),
        result=overview.result,
        is_adapter=is_adapter,
        is_merged_beside=(place / "merged").exists(),
        scores=table_texts(recorded_table(overview.result.get("scores")) or {}),
        curve=reward_line(overview.rewards).plain,
        made=overview.environment,
        options=escape_controls("\n".join(FOLDERS.sub("", option) for option in options)),
    )
    return text


def escaped(value: object) -> str:
    """A value's text on one line, with Markdown and HTML escaped."""
    line = " ".join(escape_controls(str(value)).split())
    html = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#+!|~$@:-])", r"\\\1", html)
