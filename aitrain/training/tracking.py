"""Reports a run to wandb, tensorboard and trackio.

The callbacks of transformers report the metrics, this module options, held-out scores and sample rollouts. A tracker
that fails is removed with a note: no run ends because of it.

What it uses of transformers 5.17 (tests/training/test_tracking.py trains with the real libraries):

    get_reporting_integration_callbacks([name])     the class for each name, called without arguments
    callback.on_train_begin(...)                    opens the tracker's run; wandb's takes one that is open already
    callback.on_log(..., logs=)                     metrics, at state.global_step
    TensorBoardCallback.logging_dir, .tb_writer     set before it opens, used while it is open
    TrainingArguments.project                       trackio's project, `huggingface` by default
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from aitrain import activity
from aitrain.events import Evaluated
from aitrain.options.train import TrainConfig
from aitrain.options.yaml_text import write_yaml
from aitrain.redaction import without_secrets
from aitrain.runs.rollout_record import RolloutRecord, TranscriptMessage
from aitrain.training.run_context import RunContext

PROJECT = "aitrain"
"""Project of the runs, unless the tracker's own variable names one."""
ROWS = 16
"""Rollouts in one table."""
TABLES = 20
"""Tables of training rollouts in a run; each scoring of held-out cases adds one."""
LONGEST = 4_000
"""Characters of one text in a table."""
COLUMNS = ("step", "eval_phase", "case_idx", "prompt", "completion", "score", "advantage", "stop", "error")

Row = list[str | int | float | None]


class Tracker:
    """One tracker: the callback of transformers that reports metrics to it, and its library for the rest."""

    def __init__(self, name: str) -> None:
        (made,) = get_reporting_integration_callbacks([name])
        self.name = name
        self.callback: Any = made()
        self.library: Any = None if name == "tensorboard" else import_module(name)  # an extra
        self.is_ours = False
        """Whether the tracker's run was opened here."""

    def prepare(self, context: RunContext, args: TrainingArguments) -> None:
        """Set the folder or project of the tracker's run before it is opened, unless the tracker's own variable, or
        `--trl project=...`, does so. A run of wandb that is open already is used, and left open."""
        folder = context.folder.path
        if self.name == "tensorboard":  # transformers would put the files among the checkpoints
            self.callback.logging_dir = self.callback.logging_dir or str(folder / "tensorboard")
        elif self.name == "trackio" and args.project == "huggingface":
            args.project = PROJECT
        elif self.name == "wandb" and self.library.run is None:
            self.is_ours = True
            project, place = os.environ.get("WANDB_PROJECT", PROJECT), os.environ.get("WANDB_DIR", folder)
            self.library.init(project=project, name=context.config.project_name, dir=str(place))

    def describe(self, options: dict[str, Any]) -> None:
        """Report the options, after the tracker's run was opened."""
        if self.library is None:
            self.callback.tb_writer.add_text("options", _verbatim(write_yaml(options)))
        else:
            self.library.config.update({"aitrain": options}, allow_val_change=True)

    def show(self, rows: list[Row], step: int) -> None:
        """Report a table of rollouts; for tensorboard as text that is not read as Markdown."""
        if self.library is None:
            self.callback.tb_writer.add_text("rollouts", "\n\n---\n\n".join(map(_as_markdown, rows)), step)
        else:
            self.library.log({"rollouts": self._table(rows), "train/global_step": step})

    def _table(self, rows: list[Row]) -> Any:
        if self.name == "wandb":
            return self.library.Table(columns=list(COLUMNS), data=rows)
        import pandas  # type: ignore[import-untyped, unused-ignore]  # comes with datasets

        return self.library.Table(dataframe=pandas.DataFrame(rows, columns=list(COLUMNS)))

    def close(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """End a run of the tracker that was opened here."""
        self.callback.on_train_end(args, state, control)
        if self.is_ours:
            self.library.finish()


ADVICE = {
    "wandb": " (without an account or a network: WANDB_MODE=offline)",
}


class Tracking(TrainerCallback):  # type: ignore[misc]
    """Reports to all trackers of a run; other processes than the first have none."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.trackers: dict[str, Tracker] = {}
        self.newest: dict[str, list[RolloutRecord]] = {}
        self.scores: list[Evaluated] = []
        """Scores from before the training, reported when the trackers are opened."""
        self.training: tuple[TrainingArguments, TrainerState, TrainerControl] | None = None
        for name in context.config.log.split(",") if PartialState().is_main_process else ():
            if name != "none":
                self._try(name, partial(self._add, name))

    def _add(self, name: str) -> None:
        self.trackers[name] = Tracker(name)

    def _try(self, name: str, act: Callable[[], object]) -> None:
        try:
            with activity.own.doing(f"reporting to {name}"):
                act()
        except Exception as error:
            self.trackers.pop(name, None)
            why = " ".join(str(error).split())[:200]
            self.context.note(f"{name} failed and is disabled: {type(error).__name__}: {why}{ADVICE.get(name, '')}")

    def _each(self, act: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self.trackers.items()):
            self._try(name, partial(act, tracker))

    def see(self, records: Sequence[RolloutRecord]) -> None:
        """Keep a few of the newest rollouts, of training or of a scoring of held-out cases."""
        if self.trackers and records:
            self.newest[records[0].eval_phase] = list(records[:ROWS])

    def take(self, scores: Evaluated) -> None:
        """Report scores of the held-out cases."""
        if self.training is None:
            self.scores.append(scores)
            return
        args, state, control = self.training
        values = {"eval_score": scores.sampled, "eval_greedy": scores.greedy}
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            self._each(lambda tracker: tracker.callback.on_log(args, state, control, logs=dict(known)))
        self._show(f"{scores.when.replace(' ', '')}_sampled", state.global_step)

    def _show(self, phase: str, step: int) -> None:
        rows = [_row(record) for record in self.newest.pop(phase, [])]
        if rows:
            self._each(lambda tracker: tracker.show(rows, step))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """Open the trackers, and report the scores from before the training."""
        self.training = args, state, control
        self._each(lambda tracker: tracker.prepare(self.context, args))
        self._each(lambda tracker: tracker.callback.on_train_begin(args, state, control, model=model, **rest))
        self._each(lambda tracker: tracker.describe(_options(self.context.config)))
        for scores in self.scores:
            self.take(scores)

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **rest: Any) -> None:
        """Report a line of metrics, and a table TABLES times in a run."""
        self._each(lambda tracker: tracker.callback.on_log(args, state, control, model=model, logs=dict(logs), **rest))
        every = max(1, state.max_steps // TABLES)
        if state.global_step == 1 or state.global_step % every == 0:
            self._show("", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Pass the event on: some trackers can upload checkpoints."""
        self._each(lambda tracker: tracker.callback.on_save(args, state, control, **rest))

    def close(self) -> None:
        """Close the trackers, after the last scores."""
        if (training := self.training) is not None:
            self._each(lambda tracker: tracker.close(*training))


def _options(config: TrainConfig) -> dict[str, Any]:
    """All options, without secrets in the environment's keywords or TRL's fields."""
    written = config.written()
    return {**written, **without_secrets({"rl_env_config": written["rl_env_config"] or {}, "trl": written["trl"]})}


def _row(record: RolloutRecord) -> Row:
    prompt, messages = record.transcript()
    error = f"{record.error.kind}: {record.error.message}" if record.error else ""
    return [
        record.step,
        record.eval_phase or "training",
        str(record.case_idx),
        (record.prompt if isinstance(record.prompt, str) else _as_text(prompt))[:LONGEST],
        (record.completion if len(messages) == 1 else _as_text(messages))[:LONGEST],
        record.score,
        record.advantage,
        record.stop,
        error[:LONGEST],
    ]


def _as_text(messages: Iterable[TranscriptMessage]) -> str:
    return "\n\n".join(f"{message.role}: {message.text}" for message in messages)


def _as_markdown(row: Row) -> str:
    named = dict(zip(COLUMNS, row, strict=True))
    facts = "  ".join(
        f"{name}: {named[name]}" for name in ("step", "eval_phase", "case_idx", "score", "advantage", "stop")
    )
    texts = [f"{name}:\n{named[name]}" for name in ("prompt", "completion", "error") if named[name]]
    return "\n\n".join(map(_verbatim, [facts, *texts]))


def _verbatim(text: str) -> str:
    """The text as a code block, in which nothing is read as Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())
