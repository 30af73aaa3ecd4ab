"""Runs a plan from the terminal: starts its processes, on this machine or as one of several, shows them, and prints the
result or raises the error."""

import shlex
import signal
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

from rich.console import Console

from aitrain.errors import AitrainError, ConfigError, Interrupted, RunFailed, to_aitrain_error
from aitrain.events import Announce, Ended, Event, Failed, Note, RunResult, RunStarted, encode
from aitrain.execution.process_tree import on_stop_signals
from aitrain.launch.machines import Nodes
from aitrain.launch.nodes import NodeGroup, facts, open_store
from aitrain.launch.preflight import RunPlan, done_text
from aitrain.launch.processes import Processes
from aitrain.launch.ray_processes import RayProcesses
from aitrain.options.train import EvalConfig, TrainConfig
from aitrain.runs.checkpoint import has_steps
from aitrain.runs.new_folder import remarks
from aitrain.runs.records import read_rollouts
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.ui.output import escape_controls
from aitrain.ui.overview import Overview
from aitrain.ui.page import write_report
from aitrain.ui.terminal import Screen, run_texts


def train_here(plan: RunPlan, as_json: bool = False, group: NodeGroup | None = None) -> int:
    """Train as planned and show the result; returns the exit code. `group`: the machines, if there are several, or
    another launcher started the processes of this one.

    Raises:
        AitrainError: the run failed; the message names its folder, which is removed if the run never began.
    """
    if plan.folder is not None and plan.is_done:
        if group is not None:
            group.say(folder={})
        if as_json:
            _send(RunStarted(str(plan.folder.path)))
        else:
            print(done_text(plan.folder), file=sys.stderr)
        _show_result(plan.folder, as_json)
        return 0

    with plan.open_folder() as folder:
        begin: list[Event] = [RunStarted(str(folder.path))]
        if not as_json:
            begin += [Note(line, "info") for line in start_lines(plan, folder)]
        begin += [Note(note) for note in (*plan.notes, *remarks(folder, plan.config.project_name))]
        end = run_in(folder, plan, begin, as_json, group)
    _show_result(folder, as_json)
    if end.status != "stopped":
        return 0
    if not as_json:
        why = f": {end.because}" if end.because else ""
        print(f"stopped after step {end.step} and saved{why}{how_to_continue(plan, folder)}", file=sys.stderr)
    return 0 if end.because else 130


def run_in(
    folder: RunFolder,
    plan: RunPlan,
    begin: Iterable[Event],
    as_json: bool = False,
    group: NodeGroup | None = None,
) -> Ended:
    """Run the processes of a training or an eval in its folder, and show their events after those of `begin`. A folder
    that was made for them, and has no step, or episode of an eval, at the end, is removed, unless a training failed:
    its log says why.

    Raises:
        AitrainError: they failed; the message says how to continue.
    """
    cause: BaseException | None = None
    shown: AbstractContextManager[Announce] = nullcontext(_send) if as_json else Screen()
    with shown as show:
        if isinstance(show, Screen):
            show.start()
        try:
            for event in begin:
                show(event)
            if group is not None:
                group.show_folder(folder, plan.checkpoint, plan.processes)
            kind = RayProcesses if plan.config.launcher == "ray" else Processes
            end = kind(plan, folder, show, group).run()
        except BaseException as error:  # such as of a vLLM server that does not start
            cause, ours = error, to_aitrain_error(error)
            end = Failed(str(ours), ours.exit_code)
        is_kept = not folder.is_new or folder.result.exists()
        if isinstance(plan.config, EvalConfig):
            is_kept |= any(True for _ in read_rollouts(folder.path))
        else:
            is_kept |= has_steps(folder) or (isinstance(end, Failed) and end.exit_code == RunFailed.exit_code)
        if isinstance(end, Failed):
            status = "stopped" if end.exit_code == Interrupted.exit_code else end.status
            with suppress(OSError):  # the run may have failed with the same error
                folder.write_status(status, reason=end.message)
        if is_kept:
            write_report(folder, show)
    if isinstance(end, Ended):
        return end
    where = ""
    if not is_kept:
        folder.discard()
    elif str(folder.log) not in end.message:
        details = " (train.log has the details)" if folder.log.exists() else ""
        is_refused = end.exit_code == ConfigError.exit_code  # and would be again
        where = f"\nrun folder: {folder.path}{details}{'' if is_refused else how_to_continue(plan, folder)}"
    failure = AitrainError(f"{end.message}{where}")
    failure.exit_code = end.exit_code
    raise failure from cause


def how_to_continue(plan: RunPlan, folder: RunFolder) -> str:
    """The end of a sentence with the command that continues a run; empty if nothing was saved."""
    command = Overview(folder.path).continuing()
    own = "" if plan.config.node_rank is None else ", each with its own --node-rank,"
    machines = f" on all machines{own}" if plan.nodes else ""
    return f"; continue{machines} with:\n  {escape_controls(command)}" if command else ""


def _send(event: Event) -> None:
    sys.stdout.write(encode(event))
    sys.stdout.flush()


def _show_result(folder: RunFolder, as_json: bool) -> None:
    if as_json:
        _send(RunResult(str(folder.path), read_object(folder.result)))
    else:
        console = Console(highlight=False)
        for line in run_texts(Overview(folder.path)):
            console.print(line, soft_wrap=True)


def start_lines(plan: RunPlan, folder: RunFolder) -> list[str]:
    """What a run begins with: model, environment, devices, its folder, how to watch it, and defaults of AITraining."""
    config = plan.config
    environment = ", ".join(config.environments) or config.rl_env or config.rl_env_module
    device = f"GPU {', '.join(plan.gpus)}" if plan.gpus else "the CPU"
    device += f", {plan.processes} processes" if plan.processes > 1 else ""
    trained = "a LoRA adapter" if config.peft else "all weights"
    lines = [
        f"model {config.model} ({trained}), environment {environment}, on {device}",
        f"run folder {folder.path}; watch it with: aitrain view {shlex.quote(str(folder.path))}",
    ]
    is_new = plan.folder is None  # a resumed run has what it began with
    if is_new and config.rl_preset is None and not {"rl_kl_coef", "rl_num_generations"} <= config.model_fields_set:
        usual = f"rl_kl_coef {config.rl_kl_coef}, rl_num_generations {config.rl_num_generations}"
        lines.append(f"{usual}: the defaults are those of AITraining; --rl-preset recommended sets ours")
    return lines


# -- on several machines


def train_on(nodes: Nodes, plan: RunPlan, as_json: bool, given: TrainConfig, group: NodeGroup | None) -> int:
    """Train on several machines, which must be equal, of which this is one; returns the exit code. `given`: the options
    of the command; `group`: the machines, if another launcher started it on them.

    Raises:
        AitrainError: a machine does not come or differs, or the run failed.
    """
    with on_stop_signals(signal.default_int_handler):  # before there are training processes
        own = facts(given, [source.file for source in plan.sources.values()], plan.processes)
        _say(nodes, f"waiting for the others at {nodes.place}")
        group = group or NodeGroup(nodes, open_store(nodes, given.ddp_timeout))
        try:
            group.meet(own, len(plan.gpus), given.ddp_timeout)
            return train_here(plan, as_json, group) if nodes.rank == 0 else _follow(plan, nodes, group)
        except BaseException as error:
            group.refuse(error)
            raise
        finally:
            group.leave()


def _follow(plan: RunPlan, nodes: Nodes, group: NodeGroup) -> int:
    """Run the processes of another machine than node 0; returns the exit code.

    Raises:
        AitrainError: the run failed.
    """
    found = group.find_folder()
    if found is None:
        _say(nodes, "the run has finished: nothing is left to do")
        return 0
    folder, checkpoint = found
    _say(nodes, f"connected; the output is that of node 0 ({group.infos[0].address}), the run folder {folder.path}")
    end = Processes(replace(plan, checkpoint=checkpoint), folder, lambda event: None, group).run()
    if isinstance(end, Failed):
        error = AitrainError(f"{end.message}\nrun folder: {folder.path}{how_to_continue(plan, folder)}")
        error.exit_code = end.exit_code
        raise error
    why = f": {escape_controls(end.because)}" if end.because else ""
    _say(nodes, f"{end.status} after step {end.step}{why}")
    return 0 if end.status != "stopped" or end.because else 130


def _say(nodes: Nodes, text: str) -> None:
    print(f"node {nodes.rank} of {nodes.count}: {text}", file=sys.stderr, flush=True)
