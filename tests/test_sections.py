"""Sections of options, and jobs composed of them: flags, keys, checks, help and schema follow from the sections."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from aitrain import ConfigError
from aitrain.options.generation import GenerationOptions, VLLMOptions
from aitrain.options.model import ModelOptions
from aitrain.options.reading import as_command, resolve
from aitrain.options.section import Rule
from tests.conftest import write


class ChatOptions(ModelOptions, GenerationOptions, VLLMOptions):
    """The options of a chat with a model."""

    def rules(self) -> Iterable[Rule]:
        """A rule between two sections."""
        return [(self.trust_remote_code and self.use_vllm, "trust_remote_code: not with vLLM")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rl_temperature": 0}, "rl_temperature: must be above 0, not 0"),
        ({"rl_min_new_tokens": 200}, "rl_min_new_tokens: 200 is more than a completion may have"),
        ({"trust_remote_code": True, "use_vllm": True}, "trust_remote_code: not with vLLM"),
        ({"lr": 1}, "unknown option lr."),
    ],
)
def test_a_composed_job_has_the_checks_of_its_sections_and_its_own(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChatOptions.read(given)

    assert str(caught.value).startswith(message)


def test_a_section_alone_takes_a_value_that_only_another_section_forbids() -> None:
    assert ModelOptions(quantization="int4").quantization == "int4"


def test_a_composed_job_reads_files_and_flags_and_can_be_written_as_a_command(here: Path) -> None:
    write(here, {"c.yaml": "model: tiny\nrl_top_p: 0.5\n"})

    options = resolve(ChatOptions, Path("c.yaml"), {"rl_top_p": "0.25", "use_vllm": True})

    assert (options.model, options.rl_top_p, options.use_vllm) == ("tiny", 0.25, True)
    assert as_command(options, "aitrain", "chat") == [
        "aitrain", "chat", "--model", "tiny", "--rl-top-p", "0.25", "--use-vllm",
    ]  # fmt: skip
