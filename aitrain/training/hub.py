"""Uploads folders to the Hub; the token comes from HF_TOKEN or `hf auth login` and is never stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token

from aitrain.errors import ConfigError, RunFailed
from aitrain.options.train import TrainConfig
from aitrain.runs.model_reference import ADAPTER_CONFIG, public_base
from aitrain.runs.run_folder import read_object


@dataclass(frozen=True)
class HubRepository:
    """The repository to upload to: `repo_id`, or `name` of `username` or of the owner of the token."""

    name: str
    repo_id: str | None = None
    username: str | None = None
    is_private: bool = True

    def full_name(self) -> str:
        """`owner/name`; asks the Hub for the owner of the token if it has to."""
        return self.repo_id or f"{self.username or HfApi().whoami()['name']}/{self.name}"

    def refuse_public(self) -> None:
        """Check that what is meant to be private does not go to a public repository, which would stay public.

        Raises:
            ConfigError: it would.
        """
        try:
            name = self.full_name()
            is_public = not HfApi().model_info(name).private
        except Exception:  # there is none yet, or the Hub cannot be asked
            return
        if is_public and self.is_private:
            raise ConfigError(
                f"hub_private: the repository {name} exists and is public\n"
                "Upload to it with --no-hub-private, or choose another with --repo-id."
            )

    def upload(self, folder: Path, files: Sequence[str] | None = None) -> str:
        """Upload a folder, or some of its files, and make the repository if there is none; returns its URL.

        An adapter whose base is a folder of this machine names it without the folders above it.

        Raises:
            RunFailed: the upload failed.
        """
        api = HfApi()
        try:
            repository = api.create_repo(self.full_name(), private=self.is_private, exist_ok=True)
            public = _public_adapter_config(folder)
            api.upload_folder(
                repo_id=repository.repo_id,
                folder_path=folder,
                commit_message="Trained with aitrain",
                allow_patterns=files,
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
            what = " ".join(str(error).split())[:200]
            raise RunFailed(
                f"The upload to the Hub failed: {type(error).__name__}: {what}\nThe model is saved in {folder}."
            ) from error
        return str(repository)


def _public_adapter_config(folder: Path) -> bytes | None:
    """An adapter's configuration without the place of its base on this machine; None if it has none."""
    saved = read_object(folder / ADAPTER_CONFIG)
    base = saved.get("base_model_name_or_path")
    if not isinstance(base, str) or public_base(base) == base:
        return None
    return json.dumps({**saved, "base_model_name_or_path": public_base(base)}, indent=2).encode()


def check_token() -> None:
    """Check that there is a token to upload with.

    Raises:
        ConfigError: there is no token.
    """
    if get_token() is None:
        raise ConfigError("push_to_hub: there is no token to upload with\nSet HF_TOKEN, or log in with: hf auth login")


def upload_model(config: TrainConfig, model: Path) -> str:
    """Upload the model folder of a run; returns the URL of the repository.

    Raises:
        RunFailed: the upload failed; the model is still saved in the run folder.
    """
    return HubRepository(config.project_name, config.repo_id, config.username, config.hub_private).upload(model)
