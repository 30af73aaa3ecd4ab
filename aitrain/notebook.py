"""`aitrain.train`: a run in the calling process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from aitrain import activity
from aitrain.environment.loader import load_env
from aitrain.errors import AitrainError, ConfigError, RunFailed, to_aitrain_error
from aitrain.events import Note
from aitrain.launch.managed_server import managed_server
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.system_recorder import SystemRecorder
from aitrain.options.train import TrainConfig
from aitrain.redaction import disable_telemetry
from aitrain.runs.heartbeat import Heartbeat, Progress
from aitrain.runs.result import Result
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.watchdog import Stall, Watchdog, message, write_stacks
from aitrain.ui.report_writer import ReportWriter
from aitrain.ui.terminal import Screen

if TYPE_CHECKING:
    from aitrain.training.run_context import StopRequest


def train_here(config: TrainConfig, environment: object = None) -> Result:
    """Check, train and report in this process; a refused run leaves no folder, a stalled one its log."""
    if isinstance(environment, type):
        raise ConfigError(f"environment: give an object, {environment.__name__}(...), not the class")
    plan = check(_for_one_process(config), has_environment=environment is not None)
    folder = plan.open_folder()
    try:
        return _run(plan, folder, environment)
    except (Exception, KeyboardInterrupt) as error:
        if plan.folder is None and not any(file.exists() for file in (folder.metrics, folder.result, folder.log)):
            folder.discard()
        if isinstance(error, AitrainError):
            raise
        raise to_aitrain_error(error) from error


def _for_one_process(config: TrainConfig) -> TrainConfig:
    if (config.num_processes or 1) > 1:
        raise ConfigError(
            f"num_processes: aitrain.train runs in this one process, not in {config.num_processes}\n"
            "Use the command for more: aitrain grpo --num-processes"
        )
    return config.model_copy(update={"num_processes": 1})


def _run(plan: RunPlan, folder: RunFolder, environment: object) -> Result:
    if environment is None:
        assert plan.source is not None  # check() found it
        environment = load_env(plan.source, plan.config.rl_env_config or {})
    report = ReportWriter(folder)
    with Screen() as screen:
        try:
            with Heartbeat(folder, Progress(stall_timeout=plan.config.stall_timeout)) as heartbeat:
                return _train(plan, environment, Watchers(folder, screen, report, heartbeat))
        finally:
            if folder.metrics.exists():
                report.finish(screen)


@dataclass(frozen=True)
class Watchers:
    """The folder of a run, and what shows its progress."""

    folder: RunFolder
    screen: Screen
    report: ReportWriter
    heartbeat: Heartbeat


def _train(plan: RunPlan, environment: object, watchers: Watchers) -> Result:
    disable_telemetry(plan.config.telemetry)
    from aitrain.environment.requirements import with_requirements
    from aitrain.environment.runner import start_runner
    from aitrain.jobs.grpo import run
    from aitrain.training.run_context import RunContext, StopRequest

    folder, screen, heartbeat = watchers.folder, watchers.screen, watchers.heartbeat
    resolved, required = with_requirements(plan.config, environment)
    folder.write_config(resolved)
    for note in (*plan.notes, *filter(None, [required])):
        screen(Note(note))
    with managed_server(plan, folder, screen) as url, StopRequest(raises_on_second=True).on_signals() as stop:
        changed = {"project_name": folder.path.name, **({"vllm_server_url": url} if url else {})}
        config = resolved.model_copy(update=changed)
        runner = start_runner(environment, config)
        heartbeat.start()
        announce = watchers.report.during(screen.start())
        with _ended_if_stalled(config, watchers, stop), SystemRecorder(folder.system):
            return run(RunContext(config, folder, runner, announce, stop, plan.checkpoint, heartbeat.progress))


INTERRUPT_SECONDS = 5.0
"""Seconds for a stalled run to end after it was interrupted."""


@contextmanager
def _ended_if_stalled(config: TrainConfig, watchers: Watchers, stop: StopRequest) -> Iterator[None]:
    """Interrupt a run that makes no progress, as Ctrl-C would. The process is the caller's and is not ended.

    Raises:
        RunFailed: the run stalled.
    """
    messages: list[str] = []
    over, is_main = threading.Event(), threading.current_thread() is threading.main_thread()

    def on_stall(stall: Stall) -> None:
        with suppress(OSError):
            write_stacks(watchers.folder.log, f"Stalled: {stall.phase}")
        watchers.heartbeat.progress.status = "stalled"
        watchers.heartbeat.beat()
        messages.append(message(stall, watchers.folder, 1))
        stop.requested = True  # the next request raises
        if is_main:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not over.wait(INTERRUPT_SECONDS):
            watchers.screen(Note(f"{messages[0]}\nIt cannot be interrupted: restart this process."))

    read = partial(activity.read, activity.own.memory)
    with Watchdog(config.stall_timeout, 1, read, on_stall, {0: os.getpid()}):
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if messages:
                raise RunFailed(messages[0]) from interrupt
            raise
        finally:
            over.set()
