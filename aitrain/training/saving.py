"""Saves the trained model or adapter of a run, merges adapters, and uploads a folder to the Hub, with the token of
HF_TOKEN or `hf auth login`, which is never stored.

Adapters are merged in memory, on a copy that was loaded for it: neither the base nor the adapter is changed.
"""

import json
import warnings
from pathlib import Path

import torch
from huggingface_hub import HfApi, get_token
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG
from transformers import PreTrainedModel, Trainer

from aitrain.engines.scopes import savable_generation_config
from aitrain.errors import ConfigError, RunFailed
from aitrain.execution.user_code import describe_error
from aitrain.options.train import TrainConfig
from aitrain.packages import public_base
from aitrain.runs.checkpoint import STAGING, publish
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.training.model import choose_precision, load_model


def merged(model: PeftModel) -> PreTrainedModel:
    """The base with the adapter added to its weights, which it changes.

    Tied embeddings are separated first if the adapter is on one of them: added to the weights of both, it would change
    the other one as well.
    """
    base = model.get_base_model()
    ends = [layer for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if layer is not None]
    if len(ends) == 2 and ends[0].weight is ends[1].weight and any(isinstance(end, BaseTunerLayer) for end in ends):
        head = ends[1].get_base_layer() if isinstance(ends[1], BaseTunerLayer) else ends[1]
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied embeddings, and says that it changes the configuration
        whole: PreTrainedModel = model.merge_and_unload()
    return whole


# -- the model of a run


def save_model(trainer: Trainer, folder: RunFolder) -> None:
    """Write model/ atomically; every process must call this."""
    partial = folder.path / f"{STAGING}model"
    trainer.model.config.use_cache = True  # the trainer disables it; users of the saved model need it
    trainer.save_model(str(partial))
    if trainer.accelerator.is_main_process:
        publish(partial, folder.model)
    trainer.accelerator.wait_for_everyone()


def merge_adapter(trainer: Trainer, folder: RunFolder, config: TrainConfig) -> None:
    """Write model/merged atomically: base plus adapter in the dtype of training, with the tokenizer.

    Loads the base a second time, on the CPU: the weights in use stay unchanged, and a quantized base is merged in full
    precision. Only one process may call this.
    """
    base = load_model(config.model_copy(update={"quantization": None}), choose_precision(config).dtype)
    whole = merged(PeftModel.from_pretrained(base, str(folder.model), use_safetensors=True))
    partial = folder.path / f"{STAGING}merged"
    with savable_generation_config(whole):
        whole.save_pretrained(partial)
    trainer.processing_class.save_pretrained(partial)
    publish(partial, folder.model / "merged")


# -- upload to the Hub


def repository_name(config: TrainConfig) -> str:
    """The repository that a run uploads its model to: that of the option, or one with the name of the run, of the given
    user or of the owner of the token, for whom the Hub is asked."""
    return config.repo_id or f"{config.username or HfApi().whoami()['name']}/{config.project_name}"


def check_repository(config: TrainConfig) -> None:
    """Check that there is a token to upload with, and that what is meant to be private does not go to a public
    repository, which would stay public.

    Raises:
        ConfigError: there is none, or it would.
    """
    if get_token() is None:
        raise ConfigError("push_to_hub: there is no token to upload with\nSet HF_TOKEN, or log in with: hf auth login")
    try:
        name = repository_name(config)
        is_public = not HfApi().model_info(name).private
    except Exception:  # there is none yet, or the Hub cannot be asked
        return
    if is_public and config.hub_private:
        raise ConfigError(
            f"hub_private: the repository {name} exists and is public\n"
            "Upload to it with --no-hub-private, or choose another with --repo-id."
        )


def upload(config: TrainConfig, folder: Path) -> str:
    """Upload a folder, and make the repository if there is none; returns its URL.

    An adapter whose base is a folder of this machine names it without the folders above it.

    Raises:
        RunFailed: the upload failed.
    """
    api = HfApi()
    try:
        repository = api.create_repo(repository_name(config), private=config.hub_private, exist_ok=True)
        public = _public_adapter_config(folder)
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message="Trained with aitrain",
            ignore_patterns=None if public is None else [ADAPTER_CONFIG],
        )
        if public is not None:
            api.upload_file(
                repo_id=repository.repo_id,
                path_or_fileobj=public,
                path_in_repo=ADAPTER_CONFIG,
                commit_message="Configuration of the adapter",
            )
    except Exception as error:
        raise RunFailed(
            f"The upload to the Hub failed: {describe_error(error)}\nThe model is saved in {folder}."
        ) from error
    return str(repository)


def _public_adapter_config(folder: Path) -> bytes | None:
    """An adapter's configuration without the place of its base on this machine; None if it has none."""
    saved = read_object(folder / ADAPTER_CONFIG)
    base = saved.get("base_model_name_or_path")
    if not isinstance(base, str) or public_base(base) == base:
        return None
    return json.dumps({**saved, "base_model_name_or_path": public_base(base)}, indent=2).encode()
