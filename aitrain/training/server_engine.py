"""The engine of a run whose vLLM server gets its weights as files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aitrain.engines.logprob_check import LogprobCheck
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerModel, ServerNeeds, check_for_nccl, check_server
from aitrain.engines.weight_sync import AdapterSync, DiskSync, roomy_folder
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder
from aitrain.training.model import model_path
from aitrain.vllm.client import VLLMClient

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


@dataclass(frozen=True)
class ServedRun:
    """What the engine needs to know of its run."""

    config: TrainConfig
    folder: RunFolder
    is_stopping: Callable[[], bool]
    """Whether the run was told to stop; then nobody waits for a server."""
    tell: Callable[[str], None]
    """Shows a note to the user."""

    def why_not_wait(self) -> str:
        """Why a server that is gone will not come back; empty while it may."""
        if self.is_stopping():
            return "The run was asked to stop."
        return str(self.folder.read_server().get("why", ""))


def server_engine_factory(run: ServedRun, context: int | None) -> Callable[[EpisodeTrainer], VLLMServerEngine] | None:
    """Check the run's vLLM server, and return what makes the engine for a trainer; None if TRL generates.

    Raises:
        ConfigError: the server cannot be trained with.
    """
    config, sync = run.config, run.config.weight_sync
    if sync == "nccl":
        check_for_nccl(str(config.vllm_server_url), model_path(config.model))
    if sync not in ("adapter", "disk"):
        return None
    needs = ServerNeeds(model_path(config.model), context or 0, config.lora_r if sync == "adapter" else None)
    base = check_server(str(config.vllm_server_url), needs)
    what = "the LoRA adapter alone" if sync == "adapter" else "all weights, as files"
    run.tell(f"vLLM's server gets {what} after each step (--vllm-sync {sync}).")
    return partial(_make_engine, run, base)


def _make_engine(run: ServedRun, base: ServerModel, trainer: EpisodeTrainer) -> VLLMServerEngine:
    """The engine, with the trainer's own sampling."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    folder = roomy_folder(run.folder.path, size)
    by_adapter = run.config.weight_sync == "adapter"
    sync: Any = AdapterSync(model, folder) if by_adapter else DiskSync(model, folder, renews=base.is_on_cpu)
    return VLLMServerEngine(
        VLLMClient(str(run.config.vllm_server_url)),
        sync,
        trainer.accelerator,
        base.name,
        base.longest,
        list(trainer.eos_token_ids),
        no_sense_in_waiting=run.why_not_wait,
        # a quantized base never has quite the server's weights: a difference is a note
        verify=LogprobCheck.of(model, trainer.processing_class, run.tell if run.config.quantization else None),
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        repetition_penalty=trainer.repetition_penalty,
        max_completion_length=trainer.max_completion_length,
        generation_kwargs=trainer.sampling.vllm_extras(trainer.eos_token_ids, trainer.max_completion_length),
    )
