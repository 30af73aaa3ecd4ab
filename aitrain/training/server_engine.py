"""Makes the engine of a run whose vLLM server gets the weights as files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from aitrain.engines.logprob_check import LogprobCheck
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerModel, ServerNeeds, check_for_nccl, check_server
from aitrain.engines.server_weights import ServerWeights
from aitrain.engines.weight_sync import AdapterSync, DiskSync, WeightSync, roomy_folder
from aitrain.options.train import TrainConfig
from aitrain.rollout.limits import EndOfTurn
from aitrain.runs.run_folder import RunFolder
from aitrain.training.model import model_path
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
    base = check_server(str(config.vllm_server_url), needs)
    what = "the LoRA adapter alone" if sync == "adapter" else "all weights, as files"
    run.notify(f"vLLM's server gets {what} after each step (--vllm-sync {sync}).")
    return partial(_make_engine, run, base)


def _make_engine(run: ServedRun, base: ServerModel, trainer: EpisodeTrainer, end: EndOfTurn) -> VLLMServerEngine:
    """The engine with the trainer's own sampling, which gets the trainer's weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    folder = roomy_folder(run.folder.path, size)
    by_adapter = run.config.weight_sync == "adapter"
    sync: WeightSync = AdapterSync(model, folder) if by_adapter else DiskSync(model, folder, renews=base.is_on_cpu)
    client = VLLMClient(str(run.config.vllm_server_url))
    # a quantized base differs from the server's by rounding: a difference is only noted
    check = LogprobCheck.of(model, trainer.processing_class, run.notify if run.config.quantization else None)
    return VLLMServerEngine(
        ServerWeights(client, sync, give_up_reason=run.give_up_reason),
        base.name,
        end,
        trainer.sampling,
        base.context,
        trainer.accelerator.is_main_process,
        check.compare,
    )
