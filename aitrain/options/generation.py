"""Options of generation: sampling, the limits of an episode, and vLLM."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from aitrain.options.section import Options, ResumeSafe
from aitrain.options.value_types import (
    Addresses,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Table,
    Texts,
)

_OF_AITRAINS_SERVERS = ("vllm_servers", "vllm_args")


Thinking = Literal["on", "off", "low", "medium", "high"] | Annotated[int, Field(ge=16)]
"""Values of `--thinking`; a number is a budget of tokens, in which the tag that begins a thought has room."""
THOUGHT_TOKENS, ENDING_TOKENS = 2048, 16
"""Tokens that completions are allowed for a thought without a budget; and those that the end of a thought may have."""


class GenerationOptions(Options):
    """How completions are sampled, and how long an episode may be."""

    section = "Generation"

    rl_max_new_tokens: PositiveInt = 128
    """Maximum number of tokens in one completion, besides those that --thinking adds for a thought; an episode may have
    several completions."""
    thinking: Thinking | None = None
    """Thinking before the answer, by the chat template: on, off, an effort that the template has, or a budget, the
    maximum number of tokens of a thought, at least 16. Completions may have 2,048 tokens more for it, with a budget
    that and 16. Unset: the template's default, and no more tokens."""
    rl_max_turns: PositiveInt = 16
    """Maximum number of turns in one episode."""
    rl_max_episode_tokens: PositiveInt | None = None
    """Maximum number of tokens in an episode after its prompt, from policy and environment; unset: what the context
    leaves."""
    rl_temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    rl_top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: from all. AITraining uses 50, but the update is exact only for
    completions that are sampled from all tokens."""
    rl_top_p: PositiveFraction = 1.0
    """Sample from the most likely tokens that hold this fraction of the probability; 1: from all."""
    rl_stop: Texts | None = None
    """Stop string; may be repeated. The token that completes one ends the completion, and the text stays in it."""

    @property
    def completion_tokens(self) -> int:
        """Maximum number of tokens in one completion: those of an answer, and of a thought and its end before it."""
        if self.thinking in (None, "off"):
            return self.rl_max_new_tokens
        thought = self.thinking + ENDING_TOKENS if isinstance(self.thinking, int) else THOUGHT_TOKENS
        return self.rl_max_new_tokens + thought

    @property
    def reshaped_sampling(self) -> list[str]:
        """The given options that change the distribution from softmax(logits / temperature), with their values."""
        return [f"{name} {value}" for name, value in self.changed().items() if name in ("rl_top_k", "rl_top_p")]

    def rules(self) -> Iterator[str]:
        """Stop strings are texts, each of one completion."""
        if any(text.startswith('["') for text in self.rl_stop or ()):
            yield "rl_stop: a list is no text\nRepeat the flag: --rl-stop A --rl-stop B"
        if isinstance(self.thinking, int) and self.rl_stop:
            yield f"rl_stop: with thinking {self.thinking}, a turn is two completions\nLeave one of the two out."


class VLLMOptions(Options):
    """Generation with vLLM."""

    section = "vLLM"

    use_vllm: bool = False
    """Generate with vLLM."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """vLLM inside the training processes, or a server."""
    vllm_gpu_memory_utilization: ResumeSafe[PositiveFraction | None] = None
    """Fraction of each GPU's memory that vLLM takes; unset: 0.3 beside the model, 0.9 as a server."""
    vllm_sleep_mode: ResumeSafe[bool] = False
    """Free the GPU memory of a colocated vLLM while the model trains; costs time."""
    vllm_server_url: ResumeSafe[Addresses | None] = None
    """Address of a vLLM server of yours, such as http://127.0.0.1:8000, or of several, with commas; unset: aitrain
    starts one."""
    vllm_servers: ResumeSafe[PositiveInt] = 1
    """vLLM servers that aitrain starts, each with --vllm-server-gpus GPUs."""
    vllm_tensor_parallel_size: ResumeSafe[PositiveInt] = 1
    """GPUs that one vLLM engine is split over."""
    vllm_server_gpus: ResumeSafe[NonNegativeInt] = 1
    """GPUs of this machine, the last ones, that each vLLM server on it uses: training leaves them alone; 0: a server of
    yours shares the GPUs of the training."""
    vllm_args: ResumeSafe[Table] = Field({})
    """Any other argument of aitrain's vLLM servers, as KEY=VALUE; may be repeated: --vllm-args max_num_seqs=64. In YAML
    a table."""

    @property
    def vllm_memory(self) -> float:
        """The fraction of each GPU's memory that vLLM takes."""
        return self.vllm_gpu_memory_utilization or (0.9 if self.vllm_mode == "server" else 0.3)

    @property
    def vllm_server_urls(self) -> list[str]:
        """The addresses of --vllm-server-url."""
        return [] if self.vllm_server_url is None else self.vllm_server_url.split(",")

    @property
    def starts_vllm_servers(self) -> bool:
        """Whether aitrain starts vLLM servers."""
        return self.use_vllm and self.vllm_mode == "server" and self.vllm_server_url is None

    def rules(self) -> Iterator[str]:
        """An address needs a server; servers that aitrain starts have options of their own."""
        of_ours = [name for name in _OF_AITRAINS_SERVERS if name in self.changed()]
        if of_ours and not self.starts_vllm_servers:
            yield (
                f"{', '.join(of_ours)}: for vLLM servers that aitrain starts only\n"
                "Add use_vllm and vllm_mode server (an eval: use_vllm), and leave vllm_server_url out."
            )
        if self.vllm_server_gpus == 0 and self.starts_vllm_servers:
            yield (
                "vllm_server_gpus: a server that aitrain starts has GPUs of its own\n"
                "To share one GPU, use vllm_mode colocate, or start the server yourself (vllm_server_url)."
            )
        if self.vllm_server_url is not None and not (self.use_vllm and self.vllm_mode == "server"):
            yield (
                "vllm_server_url: a server is used with use_vllm and vllm_mode server only (an eval: use_vllm)\n"
                "Add both, or leave the address out."
            )
