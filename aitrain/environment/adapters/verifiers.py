"""Environments of the verifiers library: `--rl-env verifiers:my-env`, or `verifiers:my_module:load_env` for a function.

Settings: those of `settings.py`; all others are passed to `load_environment` (verifiers 0.4: are fields of the
taskset's configuration), in `arguments` if one has the name of a setting.

verifiers 0.3 and 0.4 have different APIs: `verifiers_legacy.py` is for 0.3, `verifiers_v1.py` for 0.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from aitrain.environment.adapters.verifiers_settings import VerifiersSettings
from aitrain.environment.user_modules import module_specs
from aitrain.errors import ConfigError


def Verifiers(
    id: str,
    /,
    *,
    size: int | None = None,
    seed: int | None = None,
    system: str | None = None,
    few_shot: int = 0,
    score_range: object = None,
    arguments: Mapping[str, object] | None = None,
    **others: object,
) -> object:
    """The environment, by the adapter of the installed version."""
    settings = VerifiersSettings(id, size, seed, system, few_shot, score_range, {**others, **(arguments or {})})
    if _is_legacy():
        from aitrain.environment.adapters.verifiers_legacy import LegacyVerifiers

        return LegacyVerifiers(settings)
    from aitrain.environment.adapters.verifiers_v1 import VerifiersV1

    return VerifiersV1(settings)


def check_id(id: str, settings: Mapping[str, object]) -> None:
    """Check that the module of an id exists, without importing it.

    Raises:
        ConfigError: there is none.
    """
    module = VerifiersSettings(id).module
    places = [module] if _is_legacy() else [f"verifiers.v1.tasksets.{module}", module]
    if not any(module_specs(place) for place in places):
        raise ConfigError(f"rl_env: the verifiers environment {id} is not installed: there is no module {module}")


def _is_legacy() -> bool:
    return tuple(map(int, version("verifiers").split(".")[:2])) < (0, 4)
