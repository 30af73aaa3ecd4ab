"""Makes the engine of a run whose vLLM server gets the weights as files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list

from aitrain.engines.logprob_check import LogprobCheck
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerModel, ServerNeeds, check_for_nccl, check_servers
from aitrain.engines.server_fleet import ServerFleet
from aitrain.engines.sharded_tensors import is_sharded
from aitrain.engines.shared_forward import SharedForward
from aitrain.engines.weight_sync import AdapterSync, DiskSync, WeightSync, roomy_folder
from aitrain.options.train import TrainConfig
from aitrain.rollout.limits import EndOfTurn
from aitrain.runs.heartbeat import Progress
from aitrain.runs.run_folder import RunFolder
from aitrain.training.model import model_path
from aitrain.vllm.addresses import is_here
from aitrain.vllm.client import VLLMClient

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


@dataclass(frozen=True)
class ServedRun:
    """The values of a run that its server engine needs."""

    config: TrainConfig
    folder: RunFolder
    is_stopping: Callable[[], bool]
    """Returns whether the run was asked to stop, which ends the wait for a server."""
    notify: Callable[[str], None]
    """Shows a note to the user."""
    progress: Progress

    @property
    def urls(self) -> list[str]:
        """The addresses of its servers."""
        return self.config.vllm_server_urls

    def notify_difference(self, base: ServerModel) -> Callable[[str], None] | None:
        """Notes that a server's log-probabilities differ from the trainer's, if a base that is quantized here or there
        explains it; None: such a difference ends the run."""
        is_quantized = self.config.quantization or self.config.vllm_quantization or base.is_quantized
        return self.notify if is_quantized else None

    def note_servers(self, states: dict[str, str]) -> None:
        """Set what status.json says about the servers."""
        self.progress.vllm_servers = states

    def give_up_reason(self) -> str:
        """The reason to stop waiting for a server that is gone; empty to continue."""
        if self.is_stopping():
            return "The run was asked to stop."
        return str(self.folder.read_server().get("why", ""))


def server_engine_factory(
    run: ServedRun, context: int | None
) -> Callable[[EpisodeTrainer, EndOfTurn], VLLMServerEngine] | None:
    """Check the run's vLLM server, and return a function that makes a trainer's engine; None if TRL generates.

    Raises:
        ConfigError: the server cannot be trained with.
    """
    config, sync = run.config, run.config.weight_sync
    if sync == "nccl":
        check_for_nccl(str(config.vllm_server_url), model_path(config.model))
    if sync not in ("adapter", "disk"):
        return None
    needs = ServerNeeds(model_path(config.model), context or 0, config.lora_r if sync == "adapter" else None)
    base, count = check_servers(config.vllm_server_urls, needs), len(config.vllm_server_urls)
    what = "the LoRA adapter alone" if sync == "adapter" else "all weights, as files"
    who = "vLLM's server gets" if count == 1 else f"{count} vLLM servers get"
    run.notify(f"{who} {what} after each step (--vllm-sync {sync}).")
    return partial(_make_engine, run, base)


def _make_engine(run: ServedRun, base: ServerModel, trainer: EpisodeTrainer, end: EndOfTurn) -> VLLMServerEngine:
    """The engine with the trainer's own sampling, which gets the trainer's weights."""
    model, accelerator, urls = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator, run.urls
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    writes = accelerator.is_main_process
    place = [roomy_folder(run.folder.path, size) if all(map(is_here, urls)) else run.folder.path / "sync"]
    (folder,) = broadcast_object_list(place)  # of rank 0, which writes there; other machines would choose another one
    sync: WeightSync = DiskSync(model, folder, base.dtype, base.is_on_cpu, writes)
    if run.config.weight_sync == "adapter":
        sync = AdapterSync(model, folder, writes)
    forward = SharedForward(model, writes, is_sharded(model))
    first = accelerator.process_index % len(urls)  # ranks prefer different servers
    fleet = ServerFleet.of(map(VLLMClient, urls[first:] + urls[:first]), sync)
    fleet.give_up_reason = run.give_up_reason
    if accelerator.is_main_process:
        fleet.notify, fleet.on_change = run.notify, run.note_servers
        if len(urls) > 1:
            run.note_servers(dict.fromkeys(urls, "live"))
    checks = {url: LogprobCheck.of(forward, trainer.processing_class, run.notify_difference(base)) for url in urls}

    async def check(engine: VLLMServerEngine) -> None:
        await checks[engine.url].compare(engine)

    engine = VLLMServerEngine(fleet, base.name, end, trainer.sampling, base.context, writes, check)
    engine.together = forward.led_by_main
    return engine
