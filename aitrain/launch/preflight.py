"""Checks before a process is started, without torch and without running the user's code."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from aitrain.batch import BatchPlan, plan_batch
from aitrain.environment.loader import EnvSource, locate_environments
from aitrain.errors import AitrainError, ConfigError
from aitrain.launch.hardware import Hardware, visible_gpus
from aitrain.launch.machines import LaunchedRank, Nodes, find_nodes, given_machines, launched_rank
from aitrain.launch.model_shape import KNOWN, ModelShape, read_model_shape
from aitrain.launch.resource_estimate import (
    ResourceEstimate,
    check_resources,
    choose_batch_size,
    device_memory,
    memory_of,
)
from aitrain.options.generation import VLLMOptions
from aitrain.options.other_names import check_trl_fields
from aitrain.options.reading import resolve
from aitrain.options.run import LoRAOptions
from aitrain.options.train import EvalConfig, TrainConfig
from aitrain.packages import installed, named_folder
from aitrain.redaction import has_secret
from aitrain.runs.checkpoint import (
    PREFIX,
    changed_options,
    damage_of,
    is_named_checkpoint,
    newest_checkpoint,
    read_manifest,
    refuse_changes,
)
from aitrain.runs.environment_source import with_imported
from aitrain.runs.heartbeat import sign_of_life
from aitrain.runs.model_reference import ModelReference, read_model
from aitrain.runs.new_folder import locked, new_run_folder, refuse_to_begin
from aitrain.runs.run_folder import RunFolder, read_object, write_bytes, write_json
from aitrain.vllm.server_arguments import check_server_arguments, is_here
from aitrain.vllm.server_process import adapter_rank


@dataclass(frozen=True)
class RunPlan:
    """A run that passed all checks."""

    config: TrainConfig
    sources: Mapping[str, EnvSource]
    """Location of each environment by its name; empty for an object passed by a notebook."""
    batch: BatchPlan
    gpus: tuple[str, ...]
    """GPUs for training, in the notation of CUDA_VISIBLE_DEVICES; empty on CPU."""
    checkpoint: Path | None
    server_gpus: tuple[str, ...] = ()
    """GPUs for the vLLM servers that the run starts."""
    notes: tuple[str, ...] = ()
    """Notes for the user before the run starts."""
    nodes: Nodes | None = None
    """The machines of the run, and which of them this is; None for one machine."""
    launched: LaunchedRank | None = None
    """The first training process of this machine, where another launcher starts them."""
    folder: RunFolder | None = None
    """Run folder to resume in, which may not exist yet; None for a new one."""
    is_done: bool = False
    """Whether the run to resume has finished with these options."""
    hardware: Hardware | None = None
    """What it is planned for, in place of this machine."""
    needs: ResourceEstimate | None = None
    """What it needs of memory and disk; None if the model's shape is unknown."""

    @property
    def processes(self) -> int:
        """Number of training processes on this machine; all machines have the same."""
        return self.batch.processes // (self.nodes.count if self.nodes else 1)

    @contextmanager
    def open_folder(self) -> Iterator[RunFolder]:
        """The folder to resume in, or a new one, which is locked until the block ends; with its config.yaml. Commands
        that had it before cannot write into it any more. If the block refuses to resume, the run is as it was."""
        with new_run_folder(self.config) if self.folder is None else nullcontext(self.folder) as folder:
            files, status = (folder.config, folder.report), read_object(folder.status)
            before = {file: file.read_bytes() for file in files if file.exists()}
            folder.write_config(self.config)
            claimed = folder.claimed(**sign_of_life())
            try:
                yield claimed
            except BaseException as error:
                if getattr(error, "exit_code", None) == ConfigError.exit_code and self.folder is not None:
                    with suppress(OSError, AitrainError):  # the user is told of the first error
                        claimed.check_owner()
                        for file, content in before.items():
                            write_bytes(file, content)
                        write_json(folder.status, {**status, "epoch": claimed.epoch})
                raise


def done_text(folder: RunFolder) -> str:
    """What a command says that finds a finished run."""
    steps = read_object(folder.result).get("steps")
    return f"{folder.path}: all {steps} steps are done; --resume with a larger --max-steps continues."


def check(
    config: TrainConfig,
    has_environment: bool = False,
    locks: ExitStack | None = None,
    hardware: Hardware | None = None,
) -> RunPlan:
    """Run all checks; with other hardware, those that do not depend on this machine.

    With `locks`, the folder to resume in is locked before anything in it is read, and until these end.

    Raises:
        ConfigError: the run cannot work.
        EnvironmentFailed: the environment's file is not valid Python.
    """
    sources = _check_options(config, has_environment)
    if hardware is None or named_folder(config.model) is None:  # else it is made where the run starts
        _check_model(config)
    is_here = hardware is None and config.launcher == "local"  # only of this machine GPUs and memory are known
    launched, nodes = (launched_rank(), find_nodes(config)) if is_here else (None, None)
    visible, wanted = tuple[str, ...](), config.num_processes
    if hardware is not None:
        visible = tuple(map(str, range(hardware.gpus)))
        if hardware.machines > 1:
            nodes = Nodes(hardware.machines, 0, config.master_addr or "", config.master_port)
        if config.launcher == "ray" and wanted is not None:  # of all machines
            wanted = math.ceil(wanted / hardware.machines)
    else:
        check_packages(config)
    if is_here:
        visible = visible_gpus()
    if launched is not None:
        if wanted not in (None, launched.local_world):
            raise ConfigError(
                f"num_processes: a launcher has started {launched.local_world} on this machine, not {wanted}\nOmit it."
            )
        wanted = launched.local_world
    if nodes is not None and config.starts_vllm_servers:
        raise ConfigError(
            "vllm_mode: aitrain starts vLLM servers for a run on one machine\n"
            "Start them on machines of their own, and give their addresses: --vllm-server-url."
        )
    processes, gpus, served = _divide_gpus(config, visible, wanted)
    world = processes * (nodes.count if nodes else 1)
    shape, device = read_model_shape(config.model), memory_of(hardware.kind) if hardware else device_memory(gpus)
    notes, folder, checkpoint, is_done = list[str](), None, None, False
    is_first = nodes is None or nodes.rank == 0
    if hardware is not None:
        notes = _check_kind(hardware, config, shape)
    else:
        if is_first:  # which decides for the others
            folder = _folder_to_resume(config)
            if folder is not None and locks is not None:
                folder = locks.enter_context(locked(folder))
            is_done = folder is not None and config.resumes_newest and _is_done(folder, config)
            checkpoint = None if is_done else _find_checkpoint(config, folder, notes)
    if (is_here and is_first) or hardware is not None:  # the others read the choice in config.yaml
        recorded = None if checkpoint is None else read_manifest(checkpoint).config
        config = choose_batch_size(config, world, shape, device, recorded)
    batch = plan_batch(config, world)
    if checkpoint is not None and "deepspeed" in config.trl:
        raise ConfigError(
            "--trl deepspeed: DeepSpeed's checkpoints are pickles, which are not loaded\n"
            "Use --distributed-backend fsdp2 for runs that resume, or start a new run from a saved model."
        )
    if checkpoint is not None and not config.resume_anyway:
        changes = changed_options(read_manifest(checkpoint), config, batch.processes, batch.completions_per_step)
        refuse_changes(checkpoint, changes)
    notes = [*_notes(config), *notes]
    needs = None if shape is None else ResourceEstimate(shape, config, batch, device)
    if is_here and needs is not None:
        notes += check_resources(needs, processes, is_first)
    said = tuple(notes)
    return RunPlan(
        config, sources, batch, gpus, checkpoint, served, said, nodes, launched, folder, is_done, hardware, needs
    )


def _check_kind(hardware: Hardware, config: TrainConfig, shape: ModelShape | None) -> list[str]:
    """Notes about a run on other hardware.

    Raises:
        ConfigError: the run cannot work there, or the model's shape is not known.
    """
    kind = hardware.kind
    if shape is None:
        raise ConfigError(
            f"model: the shape of {config.model} is not known, as it is not on this machine, or quantized"
            f"\nGive a folder with its files, or one of these with its shape: {', '.join(KNOWN)}."
        )
    if config.mixed_precision == "bf16" and not kind.has_bf16:
        raise ConfigError(f"mixed_precision: a {kind.name} has no bfloat16\nUse --mixed-precision fp16, or omit it.")
    if kind.has_bf16 or config.mixed_precision is not None:
        return []
    slow = f"A {kind.name} has no bfloat16, and computes in float32, which is slow: use --mixed-precision fp16"
    return [f"{slow}, and with --peft --dtype float16."]


def check_eval(config: EvalConfig, reference: ModelReference) -> RunPlan:
    """Run all checks of an eval; the plan's options are those of the process that loads the model.

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
    sources = _check_options(config)
    is_served = config.use_vllm or reference.kind == "url"
    if is_served and (config.num_processes or 1) > 1:
        raise ConfigError(
            "num_processes: vLLM and models behind an address play an eval from one process\n"
            "Use --concurrency for more requests; --vllm-tensor-parallel-size divides a model over GPUs."
        )
    if reference.kind == "url":
        if config.use_vllm:
            raise ConfigError("use_vllm: a model behind an address generates there\nLeave the option out.")
        return RunPlan(config, sources, BatchPlan(1, 1, 1), (), None)
    check_packages(config)
    adapter, base = reference.adapter, reference.base
    rank = adapter_rank(reference) if config.use_vllm else None
    update = {"model": base if reference.kind == "hub" else absolute(base), "peft": adapter is not None}
    config = config.model_copy(update={**update, "lora_r": rank or config.lora_r})
    wanted = 1 if config.use_vllm else config.num_processes
    processes, gpus, served = _divide_gpus(config, visible_gpus(), wanted, trains=not config.use_vllm)
    return RunPlan(config, sources, BatchPlan(processes, 1, 1), gpus, None, served)


def not_checked(plan: RunPlan, with_environment: bool = True) -> list[str]:
    """What a plan leaves to the run; without `with_environment`, no process has loaded the environment."""
    environment = "the environment, its dataset, the tokenizer"
    if plan.hardware is not None:
        return [f"{environment}, what is installed there, and its disk"]
    rest = [
        f"the weights of {plan.config.model}",
        "how the environment takes the model's own answers (aitrain env check tries many)",
        "memory beyond the estimate of aitrain plan, vLLM, connections to other processes, and logins",
    ]
    return rest if with_environment else [f"{environment}, and what TRL refuses (--dry-run checks them)", *rest]


def absolute(path: str) -> str:
    """A folder as an absolute path; Hub names unchanged."""
    place = Path(os.path.expanduser(path))
    return str(place.absolute()) if place.is_dir() else path


# -- options


def _check_options(config: TrainConfig, has_environment: bool = False) -> Mapping[str, EnvSource]:
    """Check what needs no machine; returns where the environments are."""
    check_trl_fields(config)
    check_server_arguments(config.vllm_args)
    refuse_secrets(config)
    sources = {} if has_environment else locate_environments(config)
    helpers = dict[str, Path]()
    for source in sources.values():
        if source.file is not None and not source.file.with_name("__init__.py").exists():
            for file in with_imported([source.file])[1:]:
                if (other := helpers.setdefault(file.stem, file)) != file:
                    raise ConfigError(
                        f"rl_env: environments import {file} and {other}, and Python knows one module of a name\n"
                        "Give one of the files another name."
                    )
    return sources


def refuse_secrets(config: TrainConfig) -> None:
    """Refuse secrets in options that are written to config.yaml.

    Raises:
        ConfigError: there is one.
    """
    for option, value in config.written().items():
        if has_secret(value):
            raise ConfigError(
                f"{option}: it holds a secret, by its name or its form, which would be written into the run folder\n"
                "Leave it out, and let what needs it read an environment variable."
            )


def _notes(config: TrainConfig) -> Iterator[str]:
    """Notes about given options of what is not switched on, and about the inexact update if options change the
    sampling distribution."""
    for switch, section in (("use_vllm", VLLMOptions), ("peft", LoRAOptions)):
        given = [name for name in section.model_fields if name != switch and name in config.model_fields_set]
        if given and switch not in config.model_fields_set:
            yield f"{', '.join(given)}: no effect without {switch}."
    if config.reshaped_sampling:
        corrected = (
            "vLLM's log-probabilities are corrected for these options, which is exact and costs one more forward pass; "
        )
        yield (
            f"Sampling with {', '.join(config.reshaped_sampling)}: {corrected if config.use_vllm else ''}the update"
            " itself uses log-probabilities over all tokens, so the gradient is that of the unmodified distribution, on"
            " samples of the modified one. Omit these options for an exact update."
        )


# -- model and libraries


def _check_model(config: TrainConfig) -> None:
    reference, named = read_model(config.model), named_folder(config.model)
    if (
        config.starts_vllm_servers and named and not named.is_dir()
    ):  # the server starts before the process that makes it
        raise ConfigError(f"model: {config.model} is not made yet\nMake it with: aitrain chat {config.model}")
    if reference.kind == "hub":
        return
    if reference.adapter is not None:
        raise ConfigError(
            f"model: {config.model} is an adapter, not a model\nGive the merged model (its folder merged/) instead."
        )
    if Path(reference.base) != Path(config.model).expanduser():
        raise ConfigError(f"model: {config.model} is not a model folder\nDid you mean {reference.base}?")


def check_packages(config: TrainConfig) -> None:
    """Check that the packages of the options are installed.

    Raises:
        ConfigError: one is not.
    """
    wanted = {tracker: "log" for tracker in config.log.split(",") if tracker != "none"}
    if config.use_vllm and config.vllm_server_url is None:  # else the server has its own
        wanted["vllm"] = "use_vllm"
    if config.launcher == "ray" or config.is_env_on_ray:
        wanted["ray"] = "launcher" if config.launcher == "ray" else "rl_env_workers"
    for package, option in wanted.items():
        if installed(package) is None:
            advice = f'Install it with: pip install "aitrain[{package}]"'
            raise ConfigError(f"{option}: {package} is not installed\n{advice}")


# -- processes and GPUs


def _divide_gpus(
    config: TrainConfig, gpus: tuple[str, ...], wanted: int | None, trains: bool = True
) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Number of processes, the GPUs for them, and those for the vLLM servers that the run starts; servers on their
    machine hold the last ones.

    Raises:
        ConfigError: the servers take more than there are, or all that a training has; or there are too few for the
            processes.
    """
    held = config.vllm_servers * config.vllm_server_gpus
    if not config.starts_vllm_servers:
        held = config.vllm_server_gpus * sum(map(is_here, config.vllm_server_urls))
    if gpus and held > len(gpus) - trains:
        raise ConfigError(
            f"vllm_server_gpus: vLLM servers take {held} GPUs of {len(gpus)}"
            f"{', and training needs one' if trains else ''}"
        )
    own, served = gpus[: len(gpus) - held], gpus[len(gpus) - held :]
    count = wanted or max(1, len(own))
    if own and count > len(own):
        raise ConfigError(
            f"num_processes: {count} processes need {count} GPUs, and {len(own)} are available for training:"
            f" {', '.join(own)}\nOmit it for one process per GPU."
        )
    return count, own[:count], served if config.starts_vllm_servers else ()


# -- resuming


def _folder_to_resume(config: TrainConfig) -> RunFolder | None:
    """The folder in which the run continues; it may not exist yet."""
    if config.resumes_newest:
        return RunFolder(Path(os.path.expanduser(config.output_dir)) / config.project_name)
    checkpoint = Path(os.path.expanduser(config.resume_from_checkpoint or "")).resolve()
    is_in_run = checkpoint.parent.name == "checkpoints" and is_named_checkpoint(checkpoint)
    return RunFolder(checkpoint.parent.parent) if is_in_run else None


def _is_done(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether the run has finished, and the given options are its own."""
    if not all(read_object(file).get("status") == "finished" for file in (folder.status, folder.result)):
        return False
    try:
        before, now = resolve(TrainConfig, folder.config).written(), config.written()
    except ConfigError:  # of another version
        return False
    given = {*config.model_fields_set, "max_steps", "epochs"} & now.keys()
    return all(
        before.get(name) == now[name] for name in given - {"project_name", "output_dir", "num_processes", "node_rank"}
    )


def _find_checkpoint(config: TrainConfig, folder: RunFolder | None, notes: list[str]) -> Path | None:
    """The checkpoint to resume from; its files are verified. None if the run starts from the beginning. What the user
    must know of it is appended to the notes."""
    wanted = config.resume_from_checkpoint
    if wanted is None:
        return None
    if config.resumes_newest:
        assert folder is not None
        newest = newest_checkpoint(folder, notes.append)
        if newest is None:
            refuse_to_begin(folder, notes)
            missing = f"no checkpoint in {folder.path}" if folder.config.exists() else f"no run {folder.path}"
            notes.append(f"There is {missing} yet: the run starts from the beginning.")
        return newest and newest.resolve()
    path = Path(os.path.expanduser(wanted))
    if not is_named_checkpoint(path):
        newest = newest_checkpoint(RunFolder(path), lambda why: None)
        near = f"\nDid you mean {newest}?" if newest else ""
        raise ConfigError(f"resume_from_checkpoint: {path} is not a checkpoint folder ({PREFIX}<step>){near}")
    if damage := damage_of(path):
        advice = "Use --resume for the newest complete one."
        raise ConfigError(f"resume_from_checkpoint: {path} is refused: {damage}\n{advice}")
    return path.resolve()
