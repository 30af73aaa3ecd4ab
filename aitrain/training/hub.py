"""Uploads the model to the Hub; the token comes from HF_TOKEN or `hf auth login` and is never stored."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, get_token

from aitrain.errors import ConfigError, RunFailed
from aitrain.options.train import TrainConfig


def check_hub_token(config: TrainConfig) -> None:
    """Check before training that there is a token to upload with.

    Raises:
        ConfigError: there is no token.
    """
    if config.push_to_hub and get_token() is None:
        raise ConfigError("push_to_hub: there is no token to upload with\nSet HF_TOKEN, or log in with: hf auth login")


def upload_model(config: TrainConfig, model: Path) -> str:
    """Upload the model folder; returns the URL of the repository.

    Raises:
        RunFailed: the upload failed; the model is still saved in the run folder.
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
