"""The page of a sweep, sweep.html: its trials as parallel coordinates and as a table. See `page` for what is in it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from aitrain.runs.json_values import JsonObject, as_object
from aitrain.runs.run_folder import write_text
from aitrain.runs.sweep_record import SweepRecord, Trial
from aitrain.ui.page import self_contained
from aitrain.ui.sweep_table import bias_note, next_commands, shown_value

PAGE = "sweep.html"
STYLES = ("page.css", "sweep.css")
SCRIPTS = ("dom.js", "theme.js", "sweep.js")
MOST_TRIALS = 500
LINK = "{name}/report.html"


def write_page(record: SweepRecord) -> None:
    """Write sweep.html into the sweep's folder."""
    write_text(record.folder / PAGE, sweep_page(record), durable=False)


def sweep_page(record: SweepRecord, link: str = LINK) -> str:
    """The page of a sweep; `link` is the address of a trial's page, with `{name}` for its name."""
    return self_contained({**page_data(record), "link": link}, STYLES, SCRIPTS)


def page_data(record: SweepRecord) -> JsonObject:
    """The data of the page."""
    shown = [trial for trial in record.ranked if trial.values][:MOST_TRIALS]
    names = list(dict.fromkeys(name for trial in shown for name in trial.values))
    search = as_object(record.config.get("search"))
    search = {**search, **{f"trl.{key}": value for key, value in as_object(search.get("trl")).items()}}
    best = record.best
    return {
        "name": record.folder.name,
        "status": record.status,
        "planned": record.planned,
        **{key: record.config.get(key) for key in ("objective", "direction", "sampler", "pruner")},
        "fixed": {name: shown_value(value) for name, value in as_object(record.config.get("options")).items()},
        "axes": [_axis(name, search.get(name), shown) for name in names],
        "trials": [_trial(trial, names) for trial in shown],
        "counts": {name: record.count(name) for name in ("finished", "pruned", "failed", "stopped", "running")},
        "best": None if best is None else best.number,
        "note": bias_note(record),
        "commands": next_commands(record),
        "written": time.time(),
    }


def _axis(name: str, searched: object, trials: Sequence[Trial]) -> JsonObject:
    """A range of numbers has its ends; anything else has the values of the trials, in the order of the list."""
    values = [trial.values.get(name) for trial in trials]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if isinstance(searched, Mapping) and len(numbers) == len(values):
        is_log = bool(searched.get("log")) and min(numbers) > 0
        return {"name": name, "low": min(numbers), "high": max(numbers), "log": is_log}
    listed = [shown_value(value) for value in searched] if isinstance(searched, list) else []
    tried = list(dict.fromkeys(map(shown_value, values)))
    return {"name": name, "choices": [value for value in dict.fromkeys([*listed, *tried]) if value in tried]}


def _trial(trial: Trial, names: Sequence[str]) -> JsonObject:
    return {
        "number": trial.number,
        "name": trial.name,
        "status": trial.status,
        "values": [trial.values.get(name) for name in names],
        "shown": [shown_value(trial.values.get(name)) for name in names],
        "score": trial.score,
        "low": trial.interval and trial.interval["low"],
        "high": trial.interval and trial.interval["high"],
        "before": trial.before,
        "scores": sorted(trial.scores.items()),
        "seconds": trial.seconds,
        "error": trial.error,
    }
