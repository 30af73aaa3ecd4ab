"""`aitrain.train`, `aitrain.compare` and `aitrain.chat`: a run, its scores and a chat with its model, in the calling
process; and how a notebook shows the run, below the cell that started it.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import warnings
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

from aitrain import activity
from aitrain.cells import is_notebook, name_cells
from aitrain.errors import AitrainError, ConfigError, to_aitrain_error
from aitrain.events import Ended, Event, Note
from aitrain.execution.process_tree import on_stop_signals
from aitrain.launch.model_shape import is_small
from aitrain.launch.preflight import RunPlan, check, done_text
from aitrain.options.train import TrainConfig
from aitrain.redaction import RedactedStream, disable_telemetry
from aitrain.runs.checkpoint import has_steps
from aitrain.runs.heartbeat import Heartbeat, Progress
from aitrain.runs.new_folder import remarks
from aitrain.runs.result import Result
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.dashboard import Dashboard, note_text
from aitrain.ui.page import write_report
from aitrain.ui.terminal import Screen

if TYPE_CHECKING:
    from aitrain.jobs.chat import ChatSession
    from aitrain.runs.comparison import Comparison

_training = threading.Lock()
"""Held while a run trains in this process."""


def train(config: TrainConfig | None = None, environment: Any = None, **options: Any) -> Result:
    """Train in this process, as in a notebook; `environment` may be an object of a class defined there.

    `options` are those of TrainConfig, in place of a `config`: `aitrain.train(model="tiny", environment=Sums())`. A
    refused run leaves no folder.

    Raises:
        ConfigError: an option or the model is wrong, or another run trains in this process.
        EnvironmentFailed: the environment cannot be used.
        RunFailed: training failed.
        Interrupted: it was stopped before the first step.
    """
    if config is None:
        config = TrainConfig(**options)
    elif options or not isinstance(config, TrainConfig):
        raise ConfigError('config: give one TrainConfig, or options by name: train(model="tiny", environment=Sums())')
    if isinstance(environment, type):
        raise ConfigError(f"environment: give an object, {environment.__name__}(...), not the class")
    _silence_tqdm()
    with ExitStack() as locks:
        if not _training.acquire(blocking=False):  # the two would share torch's random numbers
            raise ConfigError("train: another run trains in this process\nWait for its end, or use another process.")
        locks.callback(_training.release)
        uses_others = config.launcher == "ray" or config.is_env_on_ray or config.starts_vllm_servers
        is_one = not uses_others and (config.num_processes or 1) == 1
        plan = check(config.model_copy(update={"num_processes": 1}), environment is not None, locks) if is_one else None
        if plan is None or plan.nodes is not None or plan.launched is not None:
            raise ConfigError(
                "num_processes, nnodes, launcher, rl_env_workers, vllm_mode: aitrain.train runs in this one process\n"
                "Use aitrain grpo for several processes, machines, Ray, and vLLM servers."
            )
        if plan.folder is not None and plan.is_done:
            print(done_text(plan.folder), file=sys.stderr)
            return Result.read(plan.folder.path)
        folder = locks.enter_context(plan.open_folder())
        try:
            return _run(plan, folder, environment)
        except (Exception, KeyboardInterrupt) as error:
            if not (has_steps(folder) or folder.result.exists()):
                folder.discard()
            if isinstance(error, AitrainError):
                raise
            raise to_aitrain_error(error) from error


def compare(run: Result | Path | str, other: Result | Path | str | None = None) -> Comparison:
    """The model of a run compared with that of another run or eval, case by case; by itself, with what it was before
    the training. Changes are those of `run` less the other one.

    Raises:
        ConfigError: the two have no common held-out cases.
    """
    from aitrain.runs.comparison import compare_all  # here, as only this needs it
    from aitrain.runs.recorded_scoring import read_scorings

    folders = [one.folder if isinstance(one, Result) else Path(one) for one in (other, run) if one is not None]
    return compare_all(read_scorings(folders))[0]


def _silence_tqdm() -> None:
    """Without ipywidgets, tqdm tells notebooks to install them; nothing here needs them."""
    warnings.filterwarnings("ignore", message="IProgress not found")


def _run(plan: RunPlan, folder: RunFolder, environment: object) -> Result:
    is_cell = is_notebook()
    screen: NotebookDisplay | Screen = NotebookDisplay() if is_cell else Screen()
    with screen, ExitStack() as stack:
        if is_cell:
            # a line for each score would push the display out of sight; stays open for those who keep sys.stdout
            log = folder.log.open("a", buffering=1, encoding="utf-8")
            stack.enter_context(redirect_stdout(cast(TextIO, RedactedStream(log))))
            screen(Note(f"What the environment prints goes to {folder.log}.", "info"))
        stack.callback(lambda: write_report(folder, screen) if folder.metrics.exists() else None)
        heartbeat = stack.enter_context(Heartbeat(folder, Progress(), announce=screen))
        disable_telemetry()
        import torch

        from aitrain.environment.requirements import with_requirements
        from aitrain.environment.runner import EnvRunner, start_runner
        from aitrain.jobs.env_loading import check_environments, describe_run, load_runner
        from aitrain.jobs.grpo import run
        from aitrain.training.run_context import RunContext, StopRequest

        required = ""
        if environment is None:
            runner = load_runner(plan.config, screen)
        else:
            config, required = with_requirements(plan.config, environment)
            runner = start_runner(environment, config)
        if isinstance(runner, EnvRunner):  # what each of several requires is in environment.json
            folder.write_config(runner.config)
        for note in (*plan.notes, *remarks(folder, plan.config.project_name), *filter(None, [required])):
            screen(Note(note))
        stop = StopRequest(raises_on_second=True)
        stack.enter_context(on_stop_signals(stop.request))
        config = runner.config.model_copy(update={"project_name": folder.path.name})
        activity.own.enter("starting", moves_files=True)  # not the last phase of this process's run before
        heartbeat.start()
        screen.start()
        if not plan.gpus and is_small(config.model) and "OMP_NUM_THREADS" not in os.environ:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # best for such a model, as in training processes
        result = run(
            RunContext(
                config,
                folder,
                runner,
                screen,
                describe_run,
                stop,
                plan.checkpoint,
                heartbeat.progress,
                check_environments if environment is None else lambda _: None,
            )
        )
    assert result is not None  # as it is no dry run
    return result


def chat(
    model: str | Path,
    *,
    only: str | None = None,
    system: str = "",
    greedy: bool = False,
    seed: int = 0,
    **options: Any,
) -> ChatSession:
    """Talk to a trained model and its base in this process, as in a notebook: `aitrain.chat("runs/sums")("2 + 2 = ?")`
    returns the answers by the models' names, and the next call continues the conversation.

    `options` are the sampling options of a run.

    Raises:
        ConfigError: the model cannot be loaded, or an option is wrong.
    """
    _silence_tqdm()
    from aitrain.jobs.chat import open_session

    return open_session(str(model), options, only, system, greedy, seed)


# -- the display


class NotebookDisplay(JupyterMixin):
    """Shows the lines of the terminal as one output of the cell that updates itself, without scripts.

    It needs IPython's display handles only, so it works in Jupyter, VS Code and Colab. Its last state stays in the
    saved notebook. Rich makes HTML and text of it, and escapes them.
    """

    def __init__(self) -> None:
        self.dashboard, self._notes = Dashboard(), list[Text]()
        self._handle: Any = None
        self._over = threading.Event()
        # an update from another thread belongs to this cell, not to the one that runs by then
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=[self._draw], daemon=True)

    def __enter__(self) -> Self:
        self._handle = import_module("IPython.display").display(self, display_id=True)
        return self

    def start(self) -> None:
        """Update the output every second. Call it after forking: a fork copies locks that the thread holds."""
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Show the last state, which stays in the notebook."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if error is not None:
            self.dashboard.phase = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._handle.update(self)

    def __call__(self, event: Event) -> None:
        """Take one event, which the next update shows."""
        self.dashboard.take(event)
        if isinstance(event, Note):
            self._notes.append(note_text(replace(event, text=name_cells(event.text))))
        if isinstance(event, Ended):
            self.dashboard.phase = event.status if event.because is None else f"{event.status}: {event.because}"

    def _draw(self) -> None:
        while not self._over.wait(1.0):  # each drawing is a message to the browser
            self._handle.update(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The notes, and the lines of the run."""
        yield from self._notes
        yield self.dashboard
