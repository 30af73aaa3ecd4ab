"""Checks before an eval is started, without torch and without running the user's code."""

from __future__ import annotations

import os
from pathlib import Path

from aitrain.batch import BatchPlan
from aitrain.environment.loader import find_environments
from aitrain.errors import ConfigError
from aitrain.launch.machines import given_machines
from aitrain.launch.nvidia import visible_gpus
from aitrain.launch.preflight import (
    RunPlan,
    check_packages,
    count_processes,
    count_server_gpus,
    refuse_secrets,
    starts_server,
)
from aitrain.launch.resource_check import check_vllm_memory
from aitrain.options.evaluate import EvalConfig
from aitrain.options.trl_fields import check_trl_fields
from aitrain.runs.model_reference import ADAPTER_CONFIG, ModelReference
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.vllm.addresses import check_listen_address
from aitrain.vllm.server_arguments import check_server_arguments


def check_eval(config: EvalConfig, reference: ModelReference) -> RunPlan:
    """Run all checks; the plan's options are those of the process that loads the model.

    Raises:
        ConfigError: the eval cannot work.
        EnvironmentFailed: the environment's file is not valid Python.
    """
    if config.eval_cases == 0:
        raise ConfigError(
            "eval_cases: an eval of 0 cases scores nothing\n"
            "Give a number with --cases; a run that held out none was trained on all cases of its dataset."
        )
    if given_machines(os.environ) is not None:
        raise ConfigError("An eval runs on one machine, and a launcher started it on several\nStart it once.")
    check_trl_fields(config.trl)
    check_server_arguments(config.vllm_args)
    refuse_secrets(config)
    sources = find_environments(config)
    RunFolder.check_place(config)
    if reference.kind == "url":
        _check_address(config)
        return RunPlan(config, sources, BatchPlan(1, 1, 1), (), None)
    check_packages(config)
    served, gpus, held = _served(config, reference), visible_gpus(), count_server_gpus(config)
    if not config.use_vllm:
        processes = count_processes(served, gpus)
        return RunPlan(served, sources, BatchPlan(processes, 1, 1), gpus[:processes], None)
    if (config.num_processes or 1) > 1:
        raise ConfigError(
            "num_processes: vLLM plays an eval from one process\n"
            "Leave the option out; --vllm-tensor-parallel-size divides a model over GPUs."
        )
    if gpus and held > len(gpus):
        raise ConfigError(f"vllm_servers: they take {held} GPUs, and {len(gpus)} are visible (vllm_server_gpus)")
    left, server_gpus = gpus[: len(gpus) - held], gpus[len(gpus) - held :] if starts_server(config) else ()
    if starts_server(config):
        check_vllm_memory(served, server_gpus, engines=config.vllm_servers)
        if config.vllm_listen_address is not None:
            check_listen_address(config.vllm_listen_address)
    return RunPlan(served, sources, BatchPlan(1, 1, 1), left[:1], None, server_gpus)


def _served(config: EvalConfig, reference: ModelReference) -> EvalConfig:
    """The options with the base as model, as a vLLM server is started with it."""
    adapter = reference.adapter
    rank = read_object(adapter / ADAPTER_CONFIG).get("r") if adapter else None
    base = reference.base if reference.kind == "hub" else absolute(reference.base)
    update = {"model": base, "peft": adapter is not None, "lora_r": rank or config.lora_r, "vllm_sync": "auto"}
    return config.model_copy(update=update)


def _check_address(config: EvalConfig) -> None:
    if config.use_vllm:
        raise ConfigError("use_vllm: a model behind an address generates there\nLeave the option out.")
    if (config.num_processes or 1) > 1:
        raise ConfigError("num_processes: an address is asked from one process\nUse --concurrency for more requests.")


def absolute(path: str) -> str:
    """A folder as an absolute path; Hub names unchanged."""
    place = Path(os.path.expanduser(path))
    return str(place.absolute()) if place.is_dir() else path
