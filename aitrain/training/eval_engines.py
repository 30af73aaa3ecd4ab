"""The engine of an eval: transformers, vLLM servers, or an OpenAI-compatible address."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from aitrain.engines.chat_endpoint import ChatEndpoint, served_model
from aitrain.engines.hf import HFEngine
from aitrain.engines.sampling import Sampling
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerNeeds, check_servers
from aitrain.engines.server_fleet import ServerFleet
from aitrain.engines.weight_sync import AdapterSync, WeightVersion
from aitrain.options.evaluate import EvalConfig
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.message_format import MessageFormat
from aitrain.runs.model_reference import ADAPTER_CONFIG, ModelReference
from aitrain.runs.run_folder import read_object
from aitrain.training.model import model_path
from aitrain.training.policy_loader import LoadedPolicy
from aitrain.vllm.adapter_ranks import needed_rank
from aitrain.vllm.client import VLLMClient

EvalEngine = HFEngine | VLLMServerEngine | ChatEndpoint


@dataclass(frozen=True)
class EvalModel:
    """The model of an eval, with what an engine needs beside it."""

    reference: ModelReference
    config: EvalConfig
    policy: LoadedPolicy
    longest: int | None
    """Maximum tokens of an episode; None: the model's context."""
    give_up_reason: Callable[[], str] = lambda: ""
    """Called while waiting for a server that is gone."""
    notify: Callable[[str], None] = lambda text: None
    """Shows a note to the user."""

    @property
    def step(self) -> int:
        """Optimizer step of the weights; 0 for a model that no run has trained."""
        return self.reference.step or 0


def make_engine(model: EvalModel, accelerator: Accelerator) -> HFEngine | VLLMServerEngine:
    """The engine of the options.

    Raises:
        ConfigError: a server cannot be used.
    """
    if model.config.use_vllm:
        return _server_engine(model)
    accelerator.prepare_model(model.policy.model, evaluation_mode=True)  # the autocast of a training
    return model.policy.engine()


def endpoint_engine(reference: ModelReference, config: EvalConfig, chat: MessageFormat) -> ChatEndpoint:
    """The engine of an OpenAI-compatible address.

    Raises:
        ConfigError: it does not answer, or the model must be named.
    """
    with closing(EventLoop()) as loop:
        name = loop.run(served_model(reference.base, config.model_name))
    return ChatEndpoint(reference.base, name, chat, Sampling.of(config), concurrency=config.concurrency or 16)


def adapter_rank(adapter: Path | None) -> int:
    """The rank that vLLM is started with for an adapter; 0 without one."""
    if adapter is None:
        return 0
    rank = read_object(adapter / ADAPTER_CONFIG).get("r")
    return needed_rank(rank if isinstance(rank, int) else 16)


class SavedAdapter(AdapterSync):
    """Loads an adapter from the folder in which a run has saved it."""

    def __init__(self, adapter: Path) -> None:
        super().__init__(None, adapter.resolve().parent)
        self._adapter = adapter.resolve()

    def path(self, version: WeightVersion) -> Path:
        """The folder of the adapter."""
        return self._adapter

    def write(self, version: WeightVersion) -> int:
        """No-op: the files exist."""
        return 0


def _server_engine(model: EvalModel) -> VLLMServerEngine:
    urls, adapter, policy = model.config.vllm_server_urls, model.reference.adapter, model.policy
    rank = adapter_rank(adapter) or None
    needs = ServerNeeds(model_path(model.reference.base), model.longest or 0, rank, trains=False)
    base = check_servers(urls, needs)
    fleet = ServerFleet.of(map(VLLMClient, urls), SavedAdapter(adapter or Path(model_path(model.reference.base))))
    fleet.give_up_reason, fleet.notify = model.give_up_reason, model.notify
    engine = VLLMServerEngine(fleet, base.name, policy.end, policy.sampling, base.context, has_logprobs=False)
    if adapter is None:
        engine.weight_version = model.step  # the servers' own weights: nothing is loaded
    return engine
