"""Trackers: what wandb, tensorboard and trackio are told of a run.

Metrics go through the callbacks of transformers; options, held-out scores and sample rollouts are ours. A
tracker that fails is left out from then on, and said so once: no run ends because of it.

Where we lean on transformers 5.17 (tests/training/test_tracking.py trains with the real libraries):

    get_reporting_integration_callbacks([name])     the class for each name, called without arguments
    callback.on_train_begin(...)                    opens the tracker's run; wandb's takes one that is open already
    callback.on_log(..., logs=)                     metrics, at state.global_step
    TensorBoardCallback.logging_dir, .tb_writer     set before it opens, used while it is open
    TrainingArguments.project                       trackio's project, `huggingface` where nobody named one
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
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
from aitrain.runs.run_folder import RunFolder

PROJECT = "aitrain"
"""What runs are kept under, where the tracker's own variable does not say."""
ROWS = 16
"""Rollouts in one table."""
TABLES = 20
"""Tables of training rollouts in a run; held-out scorings have one each."""
LONGEST = 4_000
"""Characters of one text in a table."""
COLUMNS = ("step", "eval_phase", "case_idx", "prompt", "completion", "score", "advantage", "stop", "error")

Row = list[str | int | float | None]


@dataclass(frozen=True)
class About:
    """The run that is told of."""

    folder: RunFolder
    config: TrainConfig

    @property
    def options(self) -> dict[str, Any]:
        """All of them, less what an environment's keywords and TRL's fields may hold of secrets."""
        written = self.config.written()
        return {**written, **without_secrets({"rl_env_config": written["rl_env_config"] or {}, "trl": written["trl"]})}


class Tracker:
    """One tracker, with the callback of transformers that tells it metrics."""

    name = ""

    def __init__(self) -> None:
        (made,) = get_reporting_integration_callbacks([self.name])
        self.callback: Any = made()

    def prepare(self, about: About, args: TrainingArguments) -> None:
        """Say where the tracker's run goes, before it is opened."""

    def describe(self, about: About) -> None:
        """Tell it the options, when it is open."""

    def show(self, rows: list[Row], step: int) -> None:
        """A table of rollouts."""

    def close(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Everything has been told."""
        self.callback.on_train_end(args, state, control)


class Wandb(Tracker):
    """Weights & Biases; a run that was open before is used, and left open."""

    name = "wandb"

    def prepare(self, about: About, args: TrainingArguments) -> None:
        """In the run folder, unless WANDB_DIR says otherwise."""
        import wandb  # type: ignore[import-not-found, unused-ignore]  # an extra

        self.wandb = wandb
        self.is_ours = wandb.run is None
        if self.is_ours:
            project, place = os.environ.get("WANDB_PROJECT", PROJECT), os.environ.get("WANDB_DIR", about.folder.path)
            wandb.init(project=project, name=about.config.project_name, dir=str(place))

    def describe(self, about: About) -> None:
        """In the run's config, beside what transformers puts there."""
        self.wandb.config.update({"aitrain": about.options}, allow_val_change=True)

    def show(self, rows: list[Row], step: int) -> None:
        """As a table of its own kind."""
        table = self.wandb.Table(columns=list(COLUMNS), data=rows)
        self.wandb.log({"rollouts": table, "train/global_step": step})

    def close(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Upload what has not been yet."""
        super().close(args, state, control)
        if self.is_ours:
            self.wandb.finish()


class TensorBoard(Tracker):
    """Event files in the run folder, unless TENSORBOARD_LOGGING_DIR says otherwise."""

    name = "tensorboard"

    def prepare(self, about: About, args: TrainingArguments) -> None:
        """Not among the checkpoints, where transformers would put them."""
        self.callback.logging_dir = self.callback.logging_dir or str(about.folder.path / "tensorboard")

    def describe(self, about: About) -> None:
        """As text."""
        self.callback.tb_writer.add_text("options", _verbatim(write_yaml(about.options)))

    def show(self, rows: list[Row], step: int) -> None:
        """As text, in which nothing of it is taken for Markdown."""
        self.callback.tb_writer.add_text("rollouts", "\n\n---\n\n".join(map(_as_markdown, rows)), step)


class Trackio(Tracker):
    """Trackio, in its own folder on this machine."""

    name = "trackio"

    def prepare(self, about: About, args: TrainingArguments) -> None:
        """`--trl project=...` names another project."""
        import trackio  # type: ignore[import-not-found, unused-ignore]  # an extra

        self.trackio = trackio
        if args.project == "huggingface":
            args.project = PROJECT

    def describe(self, about: About) -> None:
        """In the run's config, beside what transformers puts there."""
        self.trackio.config.update({"aitrain": about.options}, allow_val_change=True)

    def show(self, rows: list[Row], step: int) -> None:
        """As a table of its own kind."""
        import pandas  # type: ignore[import-untyped, unused-ignore]  # comes with datasets

        table = self.trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(COLUMNS)))
        self.trackio.log({"rollouts": table, "train/global_step": step})


TRACKERS: dict[str, Callable[[], Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}

ADVICE = {
    "wandb": " (without an account or a network: WANDB_MODE=offline)",
}


class Tracking(TrainerCallback):  # type: ignore[misc]
    """Tells all trackers of a run; on other processes than the first there are none."""

    def __init__(self, about: About, tell: Callable[[str], None]) -> None:
        self.about = about
        self.tell = tell
        self.trackers: dict[str, Tracker] = {}
        self.newest: dict[str, list[RolloutRecord]] = {}
        self.scores: list[Evaluated] = []
        """Those that were had before there was a training that a tracker could be opened for."""
        self.training: tuple[TrainingArguments, TrainerState, TrainerControl] | None = None
        for name in about.config.log.split(",") if PartialState().is_main_process else ():
            if name != "none":
                self._try(name, partial(self._add, name))

    def _add(self, name: str) -> None:
        self.trackers[name] = TRACKERS[name]()

    def _try(self, name: str, act: Callable[[], object]) -> None:
        try:
            with activity.own.doing(f"reporting to {name}"):
                act()
        except Exception as error:
            self.trackers.pop(name, None)
            why = " ".join(str(error).split())[:200]
            self.tell(f"{name} failed and is left out: {type(error).__name__}: {why}{ADVICE.get(name, '')}")

    def _each(self, act: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self.trackers.items()):
            self._try(name, partial(act, tracker))

    def see(self, records: Sequence[RolloutRecord]) -> None:
        """The newest rollouts of training or of a held-out scoring; a few of them will be shown."""
        if self.trackers and records:
            self.newest[records[0].eval_phase] = list(records[:ROWS])

    def take(self, scores: Evaluated) -> None:
        """The held-out cases were scored."""
        if self.training is None:
            self.scores.append(scores)
            return
        args, state, control = self.training
        values = {"eval_score": scores.sampled, "eval_greedy": scores.greedy}
        told = {name: value for name, value in values.items() if value is not None}
        if told:
            self._each(lambda tracker: tracker.callback.on_log(args, state, control, logs=dict(told)))
        self._show(f"{scores.when.replace(' ', '')}_sampled", state.global_step)

    def _show(self, when: str, step: int) -> None:
        rows = [_row(record) for record in self.newest.pop(when, [])]
        if rows:
            self._each(lambda tracker: tracker.show(rows, step))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """Open them, and tell what was before."""
        self.training = args, state, control
        self._each(lambda tracker: tracker.prepare(self.about, args))
        self._each(lambda tracker: tracker.callback.on_train_begin(args, state, control, model=model, **rest))
        self._each(lambda tracker: tracker.describe(self.about))
        for scores in self.scores:
            self.take(scores)

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **rest: Any) -> None:
        """A line of metrics, and now and then a table."""
        self._each(lambda tracker: tracker.callback.on_log(args, state, control, model=model, logs=dict(logs), **rest))
        every = max(1, state.max_steps // TABLES)
        if state.global_step == 1 or state.global_step % every == 0:
            self._show("", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Some upload checkpoints, where their own variables say so."""
        self._each(lambda tracker: tracker.callback.on_save(args, state, control, **rest))

    def close(self) -> None:
        """After the last scores, and not at the end of training, which comes before."""
        if (training := self.training) is not None:
            self._each(lambda tracker: tracker.close(*training))


def _row(record: RolloutRecord) -> Row:
    asked, said = record.transcript()
    error = f"{record.error.kind}: {record.error.message}" if record.error else ""
    return [
        record.step,
        record.eval_phase or "training",
        str(record.case_idx),
        (record.prompt if isinstance(record.prompt, str) else _as_text(asked))[:LONGEST],
        (record.completion if len(said) == 1 else _as_text(said))[:LONGEST],
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
    """A code block, which is the one place where Markdown leaves text alone."""
    return "\n".join(f"    {line}" for line in text.splitlines())
