"""Runs on several machines, from the terminal: the machines meet, and what the ones beside node 0 print."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from aitrain.errors import AitrainError
from aitrain.events import Failed
from aitrain.launch.machines import Nodes, find_nodes
from aitrain.launch.node_link import NodeLink
from aitrain.launch.node_processes import FollowingProcesses
from aitrain.launch.nodes import facts, find_folder, gather_nodes, join_node_0
from aitrain.launch.preflight import RunPlan
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.next_steps import continuing

REFUSAL_SECONDS = 5.0
"""Seconds for the attempt to tell the other machines that this one cannot run the command."""


def meet(plan: RunPlan, nodes: Nodes) -> NodeLink:
    """Connect the machines of a run, which must be equal.

    Raises:
        AitrainError: one does not come or differs.
    """
    config, output_dir = plan.config, Path(plan.config.output_dir).expanduser()
    own = facts(config, [source.file for source in plan.sources.values()], plan.processes)
    whom = "the others" if nodes.count > 2 else f"node {1 - nodes.rank}"
    _say(nodes, f"waiting for {whom} at {nodes.place}")
    if nodes.rank == 0:
        return gather_nodes(nodes, own, output_dir, config.ddp_timeout)
    return join_node_0(nodes, own, output_dir, config.ddp_timeout, len(plan.gpus))


def report_refusal(config: TrainConfig, error: AitrainError) -> None:
    """Tell the other machines of a run that the checks on this one refused the command; they would wait for it."""
    with suppress(AitrainError, OSError):
        nodes, why = find_nodes(config), str(error).partition("\n")[0]
        folder = Path(config.output_dir).expanduser()
        if nodes is not None and nodes.rank == 0:
            gather_nodes(nodes, {}, folder, REFUSAL_SECONDS).tell("refused", why=why)
        elif nodes is not None:
            join_node_0(nodes, {"refused": why}, folder, REFUSAL_SECONDS)


def follow(plan: RunPlan, nodes: Nodes, link: NodeLink) -> int:
    """Run the processes of another machine than node 0; returns the exit code.

    Raises:
        AitrainError: the run failed.
    """
    shared = find_folder(link)
    if shared is None:
        _say(nodes, "the run has finished: nothing is left to do")
        return 0
    folder = RunFolder(shared.path, epoch=shared.epoch)
    _say(nodes, f"connected; the output is that of node 0 ({link.peers[0].address}), the run folder {folder.path}")
    end = FollowingProcesses(plan, folder, lambda event: None, link=link, shared=shared).run()
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
    command = continuing(folder)
    own = "" if plan.config.node_rank is None else ", each with its own --node-rank"
    return f"\nContinue on all machines{own}:\n  {escape_controls(command)}" if command else ""


def _say(nodes: Nodes, text: str) -> None:
    print(f"node {nodes.rank} of {nodes.count}: {text}", file=sys.stderr, flush=True)
