"""The part of a run that Ray Train does: it places the ranks, and starts all of them again when one is lost."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from aitrain.execution.ray_connection import has_gpus
from aitrain.launch.preflight import RunPlan, starts_server
from aitrain.launch.ray_placement import Bundle
from aitrain.launch.ray_relay import RunRelay
from aitrain.launch.ray_server import server_needs
from aitrain.launch.ray_worker import RankJob, run_rank
from aitrain.runs.run_folder import RunFolder

PRIVATE = ".ray"
"""Folder for what Ray Train writes, in the run folder; deleted at the end."""


def training_needs() -> dict[str, float]:
    """What one training process reserves: a GPU, if the cluster has one."""
    return {"CPU": 1.0, "GPU": 1.0} if has_gpus() else {"CPU": 1.0}


def bundles(plan: RunPlan) -> list[Bundle]:
    """What a run reserves, in the order in which Ray is asked for it."""
    server = [Bundle("vLLM server", server_needs(plan))] if starts_server(plan.config) else []
    return [*server, *[Bundle("training", training_needs())] * plan.batch.processes]


def start_relay(plan: RunPlan, folder: RunFolder) -> Any:
    """The handle of the run's relay, an actor on the machine of the command."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, scheduling_strategy=here)(RunRelay)
    checkpoint = None if plan.checkpoint is None else str(plan.checkpoint)
    return actor.remote(RunFolder(folder.path.absolute()), plan.batch.processes, checkpoint)


def fit(plan: RunPlan, run_folder: RunFolder, relay: Any) -> None:
    """Run Ray Train until the run has ended.

    Raises:
        Exception: a rank was lost more often than it may be, or Ray failed; see ray_processes.py: cause_of.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    folder = replace(run_folder, path=run_folder.path.absolute())
    nonce = f"{PRIVATE}/{os.urandom(8).hex()}"
    (folder.path / PRIVATE).mkdir(exist_ok=True)
    (folder.path / nonce).touch()
    variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}  # for environments on Ray
    variables |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    job = RankJob(replace(plan, sources={}), folder, os.getcwd(), nonce, relay, variables)
    needs = training_needs()
    DataParallelTrainer(
        run_rank,
        train_loop_config={"job": job},
        scaling_config=ScalingConfig(
            num_workers=plan.batch.processes, use_gpu="GPU" in needs, resources_per_worker=needs
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(folder.path / PRIVATE),
            failure_config=FailureConfig(max_failures=plan.config.max_failures),
        ),
    ).fit()
