"""Runs on several machines, or by ranks that another launcher started, each of which counts as one, from the terminal:
they meet, and what the ones beside node 0 print."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from aitrain.cli.flags import Verbosity
from aitrain.cli.running import how_to_continue, train_here
from aitrain.errors import AitrainError, write_error_file
from aitrain.events import Failed
from aitrain.launch.machines import LaunchedRank, Nodes
from aitrain.launch.nodes import (
    POLL,
    MachineStore,
    NodeGroup,
    StoreLostError,
    connect,
    facts,
    open_group,
    silence,
)
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes, on_stop_signals
from aitrain.options.train import TrainConfig
from aitrain.ui.escape_controls import escape_controls

REFUSAL_SECONDS = 5.0
"""Seconds for the attempt to tell the other machines that this one cannot run the command."""

END_SECONDS = 60.0
"""Seconds for rank 0 to show the end of the run, as the launcher ends all when one has ended."""


def as_rank(rank: LaunchedRank, options: TrainConfig, train: Callable[[TrainConfig, NodeGroup], int]) -> int:
    """Train as one of the processes that another launcher has started; returns the exit code. Only rank 0 speaks.

    Raises:
        AitrainError: on rank 0, the run failed.
    """
    group, store = open_group(rank, options.ddp_timeout)
    if rank.rank == 0:
        try:
            return train(_restarted(options, rank, store), group)
        finally:
            group.store.put("done", True)
    try:
        code = train(options, group)
    except AitrainError as error:
        write_error_file(error)
        code = error.exit_code
    deadline = time.monotonic() + END_SECONDS
    with suppress(StoreLostError):
        while not group.store.get("done") and time.monotonic() < deadline:
            time.sleep(POLL)
    return code


def _restarted(config: TrainConfig, rank: LaunchedRank, store: MachineStore | None) -> TrainConfig:
    """The options of rank 0; after a restart by the launcher, those that continue in the run folder."""
    starts = reversed(range(rank.restarts))
    found = next(filter(None, (store.below(number).get("folder") for number in starts)), None) if store else None
    if found is None:
        return config
    path = Path(found)
    place = {"output_dir": str(path.parent), "project_name": path.name}
    return config.model_copy(update={**place, "resume_from_checkpoint": "auto"})


def train_on(nodes: Nodes, plan: RunPlan, verbosity: Verbosity, given: TrainConfig, group: NodeGroup | None) -> int:
    """Train on several machines, which must be equal, of which this is one; returns the exit code. `given`: the options
    of the command; `group`: the machines, if another launcher started it on them.

    Raises:
        AitrainError: a machine does not come or differs, or the run failed.
    """
    with on_stop_signals(_interrupt):  # before there are training processes
        own = facts(given, [source.file for source in plan.sources.values()], plan.batch.processes)
        gpus = len(plan.gpus) if plan.launched is None else min(1, len(plan.gpus))
        whom = "the others" if nodes.count > 2 else f"node {1 - nodes.rank}"
        _say(plan, nodes, f"waiting for {whom} at {nodes.place}")
        group = group or _connect(nodes, given.ddp_timeout)
        group.meet(own, gpus, given.ddp_timeout)
        try:
            return train_here(plan, verbosity, group) if nodes.rank == 0 else _follow(plan, nodes, group)
        except BaseException:
            group.leave()
            raise


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _connect(nodes: Nodes, seconds: float) -> NodeGroup:
    store = connect(nodes, seconds, is_local=nodes.address in ("127.0.0.1", "localhost"))
    return NodeGroup(nodes, store, silence(seconds))


def report_refusal(nodes: Nodes, group: NodeGroup | None, error: AitrainError) -> None:
    """Tell the other machines of a run that the checks on this one refused the command; they would wait for it."""
    why = str(error).partition("\n")[0]
    with suppress(AitrainError, OSError):
        group = group or _connect(nodes, REFUSAL_SECONDS)
        group.refuse(f"nnodes: node {nodes.rank} cannot run this command: {why}")


def _follow(plan: RunPlan, nodes: Nodes, group: NodeGroup) -> int:
    """Run the processes of another machine than node 0; returns the exit code.

    Raises:
        AitrainError: the run failed.
    """
    found = group.find_folder()
    if found is None:
        group.leave()
        _say(plan, nodes, "the run has finished: nothing is left to do")
        return 0
    folder, checkpoint = found
    _say(
        plan, nodes, f"connected; the output is that of node 0 ({group.infos[0].address}), the run folder {folder.path}"
    )
    end = Processes(replace(plan, checkpoint=checkpoint), folder, lambda event: None, group).run()
    if isinstance(end, Failed):
        how = how_to_continue(plan, folder) or "; the output of node 0 may have a command to continue"
        error = AitrainError(f"{end.message}\nrun folder: {folder.path}{how}")
        error.exit_code = end.exit_code
        raise error
    why = f": {escape_controls(end.because)}" if end.because else ""
    _say(plan, nodes, f"{end.status} after step {end.step}{why}")
    return 0 if end.status != "stopped" or end.because else 130


def _say(plan: RunPlan, nodes: Nodes, text: str) -> None:
    if plan.launched is None:
        print(f"node {nodes.rank} of {nodes.count}: {text}", file=sys.stderr, flush=True)
