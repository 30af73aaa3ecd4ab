"""Makes the engine of a run whose vLLM server gets the weights as files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list

from aitrain.engines.logprob_check import LogprobCheck, SharedForward
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerModel, ServerNeeds, check_for_nccl, check_servers
from aitrain.engines.server_fleet import ServerFleet
from aitrain.engines.sharded_tensors import is_sharded
from aitrain.engines.weight_sync import AdapterSync, DiskSync, WeightSync, roomy_folder
from aitrain.options.train import TrainConfig
from aitrain.rollout.limits import EndOfTurn
from aitrain.training.model import model_path
from aitrain.training.run_context import RunContext
from aitrain.vllm.addresses import is_here
from aitrain.vllm.client import VLLMClient

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


def notify_difference(
    config: TrainConfig, base: ServerModel, notify: Callable[[str], None]
) -> Callable[[str], None] | None:
    """`notify`, which is told that a server's log-probabilities differ from the trainer's, if a base that is quantized
    here or there explains it; None: such a difference ends the run."""
    return notify if config.quantization or config.vllm_quantization or base.is_quantized else None


def server_engine_factory(
    run: RunContext, max_tokens: int | None
) -> Callable[[EpisodeTrainer, EndOfTurn], VLLMServerEngine] | None:
    """Check the run's vLLM servers, and return a function that makes a trainer's engine; None if TRL generates.
    `max_tokens`: of prompt and completion together.

    Raises:
        ConfigError: the server cannot be trained with.
    """
    config, sync = run.config, run.config.weight_sync
    if sync == "nccl":
        check_for_nccl(str(config.vllm_server_url), model_path(config.model))
    if sync not in ("adapter", "disk"):
        return None
    needs = ServerNeeds(model_path(config.model), max_tokens or 0, config.lora_r if sync == "adapter" else None)
    base, count = check_servers(config.vllm_server_urls, needs), len(config.vllm_server_urls)
    what = "the LoRA adapter alone" if sync == "adapter" else "all weights, as files"
    who = "vLLM's server gets" if count == 1 else f"{count} vLLM servers get"
    run.note(f"{who} {what} after each step (--vllm-sync {sync}).")
    return partial(_make_engine, run, base)


def _make_engine(run: RunContext, base: ServerModel, trainer: EpisodeTrainer, end: EndOfTurn) -> VLLMServerEngine:
    """The engine with the trainer's own sampling, which gets the trainer's weights."""
    accelerator, urls = trainer.accelerator, run.config.vllm_server_urls
    model = accelerator.unwrap_model(trainer.model)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    writes = accelerator.is_main_process
    place = [roomy_folder(run.folder.path, size) if all(map(is_here, urls)) else run.folder.path / "sync"]
    (folder,) = broadcast_object_list(place)  # of rank 0, which writes there; other machines would choose another one
    sync: WeightSync = AdapterSync(model, folder, writes)
    if run.config.weight_sync == "disk":
        sync = DiskSync(model, folder, writes, base.dtype)
        sync.renews = base.is_on_cpu
    forward = SharedForward(model, writes, is_sharded(model))
    first = accelerator.process_index % len(urls)  # ranks prefer different servers
    fleet = ServerFleet.of(map(VLLMClient, urls[first:] + urls[:first]), sync)

    def note_servers(states: dict[str, str]) -> None:
        run.progress.vllm_servers = states

    fleet.give_up_reason = run.give_up_reason
    if accelerator.is_main_process:
        fleet.notify, fleet.on_change = run.note, note_servers
        if len(urls) > 1:
            note_servers(dict.fromkeys(urls, "live"))
    noted = notify_difference(run.config, base, run.note)
    checks = {url: LogprobCheck(forward, trainer.processing_class, noted) for url in urls}

    async def check(engine: VLLMServerEngine) -> None:
        await checks[engine.fleet.urls].compare(engine)

    engine = VLLMServerEngine(fleet, base.name, end, trainer.sampling, base.context, check)
    engine.together = forward.led_by_main
    return engine
