"""Runs on several machines, from the terminal: the machines meet, and what the ones beside node 0 print."""

from __future__ import annotations

import sys
from contextlib import suppress

from aitrain.errors import AitrainError
from aitrain.events import Failed
from aitrain.launch.machines import Nodes
from aitrain.launch.nodes import NodeGroup, facts, join_store, serve_store, silence
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.overview import Overview

REFUSAL_SECONDS = 5.0
"""Seconds for the attempt to tell the other machines that this one cannot run the command."""


def meet(plan: RunPlan, nodes: Nodes, given: TrainConfig, group: NodeGroup | None) -> NodeGroup:
    """Connect the machines of a run, which must be equal. `given`: the options of the command; `group`: the machines,
    if another launcher started the command on them.

    Raises:
        AitrainError: one does not come or differs.
    """
    own = facts(given, [source.file for source in plan.sources.values()], plan.processes)
    whom = "the others" if nodes.count > 2 else f"node {1 - nodes.rank}"
    _say(nodes, f"waiting for {whom} at {nodes.place}")
    group = group or _connect(nodes, given.ddp_timeout)
    group.silence = silence(given.ddp_timeout)
    group.meet(own, len(plan.gpus), given.ddp_timeout)
    return group


def _connect(nodes: Nodes, seconds: float) -> NodeGroup:
    if nodes.rank > 0:
        return NodeGroup(nodes, join_store(nodes.address, nodes.port, seconds))
    is_local = nodes.address in ("127.0.0.1", "localhost")
    return NodeGroup(nodes, serve_store(nodes.address, nodes.port, is_local))


def report_refusal(nodes: Nodes, group: NodeGroup | None, error: AitrainError) -> None:
    """Tell the other machines of a run that the checks on this one refused the command; they would wait for it."""
    why = str(error).partition("\n")[0]
    with suppress(AitrainError, OSError):
        group = group or _connect(nodes, REFUSAL_SECONDS)
        group.refuse(f"nnodes: node {nodes.rank} cannot run this command: {why}")


def follow(plan: RunPlan, nodes: Nodes, group: NodeGroup) -> int:
    """Run the processes of another machine than node 0; returns the exit code.

    Raises:
        AitrainError: the run failed.
    """
    found = group.find_folder()
    if found is None:
        group.leave()
        _say(nodes, "the run has finished: nothing is left to do")
        return 0
    folder, checkpoint = found
    _say(nodes, f"connected; the output is that of node 0 ({group.infos[0].address}), the run folder {folder.path}")
    end = Processes(plan, folder, lambda event: None, group, checkpoint).run()
    if isinstance(end, Failed):
        advice = how_to_continue(plan, folder) or "\nSee the output of node 0, which may have a command to continue."
        error = AitrainError(f"{end.message}{advice}")
        error.exit_code = end.exit_code
        raise error
    why = f": {escape_controls(end.because)}" if end.because else ""
    _say(nodes, f"{end.status} after step {end.step}{why}")
    return 0 if end.status != "stopped" or end.because else 130


def how_to_continue(plan: RunPlan, folder: RunFolder) -> str:
    """The command that continues a run that failed, as further lines of a message; empty if nothing was saved."""
    command = Overview(folder.path).continuing()
    own = "" if plan.config.node_rank is None else ", each with its own --node-rank"
    return f"\nContinue on all machines{own}:\n  {escape_controls(command)}" if command else ""


def _say(nodes: Nodes, text: str) -> None:
    print(f"node {nodes.rank} of {nodes.count}: {text}", file=sys.stderr, flush=True)
