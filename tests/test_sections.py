"""Sections of options, and jobs composed of them: flags, keys, checks, help and schema follow from the sections."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import pytest
import typer
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from aitrain import ConfigError, TrainConfig
from aitrain.cli.flags import Flag, with_options
from aitrain.options.documentation import help_text, options_page
from aitrain.options.generation import GenerationOptions, VLLMOptions
from aitrain.options.model import ModelOptions
from aitrain.options.option import options_of
from aitrain.options.reading import as_command, resolve
from aitrain.options.schema import json_schema
from aitrain.options.section import Options, Rule, sections_of
from tests.conftest import write


class ChatOptions(ModelOptions, GenerationOptions, VLLMOptions):
    """The options of a chat with a model."""

    def rules(self) -> Iterable[Rule]:
        """A rule between two sections."""
        return [(self.trust_remote_code and self.use_vllm, "trust_remote_code: not with vLLM")]


class Chatty(Options):
    """A section of its own."""

    section = "Chat"

    history: Annotated[int, "turns"] = 8
    """Turns that the model is
    shown."""


def test_a_job_has_the_options_of_its_sections_and_no_other() -> None:
    names = [option.name for option in options_of(ChatOptions)]

    assert [section.section for section in sections_of(ChatOptions)] == ["Model", "Generation", "vLLM"]
    assert names[0] == "model"
    assert "rl_temperature" in names
    assert "vllm_mode" in names
    assert "lr" not in names
    assert set(names) == set(ChatOptions.model_fields)
    assert ChatOptions(rl_temperature=0.5).rl_temperature == 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rl_temperature": 0}, "rl_temperature: must be above 0, not 0\nSampling temperature."),
        ({"rl_min_new_tokens": 200}, "rl_min_new_tokens: 200 is more than a completion may have"),
        ({"vllm_server_url": "http://x:1"}, "vllm_server_url: a server is used with --use-vllm"),
        ({"trust_remote_code": True, "use_vllm": True}, "trust_remote_code: not with vLLM"),
        ({"lr": 1}, "unknown option lr."),
        ({"temperature": 1}, "unknown option temperature. Use rl_temperature."),
    ],
)
def test_a_composed_job_has_the_checks_of_its_sections_and_its_own(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChatOptions.read(given)

    assert str(caught.value).startswith(message)


def test_a_composed_job_reads_files_and_flags_and_can_be_written_as_a_command(here: Path) -> None:
    write(here, {"c.yaml": "model: tiny\nrl_top_p: 0.5\n"})

    options = resolve(ChatOptions, Path("c.yaml"), {"rl_top_p": "0.25", "use_vllm": True})

    assert (options.model, options.rl_top_p, options.use_vllm) == ("tiny", 0.25, True)
    assert as_command(options, "aitrain", "chat") == [
        "aitrain", "chat", "--model", "tiny", "--rl-top-p", "0.25", "--use-vllm",
    ]  # fmt: skip
    write(here, {"c.yaml": "learning_rate: 1\n"})
    with pytest.raises(ConfigError, match=r"^unknown option learning_rate \(in c.yaml\)\.$"):
        resolve(ChatOptions, Path("c.yaml"))


def test_a_command_gets_the_flags_of_a_composed_job() -> None:
    app = typer.Typer()

    @app.command()
    @with_options(ChatOptions)
    def chat(name: Annotated[str, typer.Argument()], **flags: Flag) -> int:
        given = {flag: value for flag, value in flags.items() if value is not None}
        print(name, resolve(ChatOptions, None, given).changed())
        return 0

    runner = CliRunner()
    done = runner.invoke(app, ["me", "--rl-top-k", "5", "--use-vllm"])

    assert done.output == "me {'rl_top_k': 5, 'use_vllm': True}\n"
    assert runner.invoke(app, ["me", "--lr", "5"]).exit_code == 2


def test_a_composed_job_has_a_help_a_page_and_a_schema() -> None:
    assert "vLLM:\n  --use-vllm\n        Generate with vLLM. [off]\n" in help_text(ChatOptions)
    assert "| `--rl-min-p` | `0.0` | number, at least 0, at most 1 |" in options_page(ChatOptions)

    validator = Draft202012Validator(json_schema(ChatOptions))
    assert validator.is_valid(json.loads(json.dumps(ChatOptions().written())))
    assert not validator.is_valid({"lr": 1})
    assert not validator.is_valid({"rl_min_p": 2})


def test_the_description_of_an_option_is_the_docstring_below_its_field() -> None:
    (option,) = options_of(Chatty)

    assert (option.section, option.description) == ("Chat", "Turns that the model is shown.")
    assert (option.flag, option.values, option.shown_default) == ("--history", "integer", "8")


def test_a_value_that_only_another_section_forbids_is_taken_by_the_section_alone() -> None:
    assert ModelOptions(quantization="int4").quantization == "int4"
    with pytest.raises(ConfigError, match="add peft=True"):
        TrainConfig(quantization="int4")
