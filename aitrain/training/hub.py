"""The result on the Hub. The token comes from HF_TOKEN or the hub login, and is never written anywhere."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, get_token

from aitrain.errors import ConfigError, RunFailed
from aitrain.options.train import TrainConfig


def check_hub(config: TrainConfig) -> None:
    """Before hours of training: is there a token to upload with at the end?

    Raises:
        ConfigError: there is none.
    """
    if config.push_to_hub and get_token() is None:
        raise ConfigError("push_to_hub: there is no token to upload with\nSet HF_TOKEN, or log in with: hf auth login")


def push(config: TrainConfig, model: Path) -> str:
    """Upload the model folder; returns the repository's address.

    Raises:
        RunFailed: the Hub refused; everything is saved here all the same.
    """
    api = HfApi()
    try:
        owner = config.username or api.whoami()["name"]
        repository = api.create_repo(
            config.repo_id or f"{owner}/{config.project_name}", private=config.hub_private, exist_ok=True
        )
        api.upload_folder(repo_id=repository.repo_id, folder_path=model, commit_message="Trained with aitrain")
    except Exception as error:
        what = " ".join(str(error).split())[:200]
        raise RunFailed(
            f"The upload to the Hub failed: {type(error).__name__}: {what}\nThe model is saved in {model}."
        ) from error
    return str(repository)
