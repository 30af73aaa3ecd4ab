"""Tokenizer, weights, LoRA and quantization of a model."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import httpx
import torch
from huggingface_hub import constants, get_session, try_to_load_from_cache
from peft import LoraConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from aitrain import activity
from aitrain.engines.scopes import innermost
from aitrain.errors import ConfigError, did_you_mean
from aitrain.options.train import TrainConfig
from aitrain.packages import SMOLLM2, named_folder

CHAT_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
}


@dataclass(frozen=True)
class Precision:
    """Number formats of the run, supported by this machine."""

    dtype: torch.dtype
    autocast: str
    """Format of computations: bf16, fp16 or no."""
    use_cpu: bool
    note: str | None = None
    """What the user is to know about the choice."""


def choose_precision(config: TrainConfig) -> Precision:
    """The number formats of the options; where they are not set, bf16 if the hardware supports it.

    Raises:
        ConfigError: the hardware does not support an option.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if config.quantization is not None and not cuda:
        raise ConfigError(f"quantization: {config.quantization} needs a CUDA GPU, and none is visible")
    has_bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    autocast, note = config.mixed_precision or ("bf16" if has_bf16 else "no"), None
    if autocast == "fp16" and not cuda:
        raise ConfigError("mixed_precision: fp16 needs a CUDA GPU\nOmit it to get a supported format.")
    if autocast == "bf16" and cuda and not has_bf16:
        raise ConfigError("mixed_precision: this GPU has no bf16\nOmit it, or use --mixed-precision fp16.")
    if autocast == "bf16" and not (cuda or mps) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        autocast = "no"  # emulated, it takes 4 to 7 times as long as float32
        note = "mixed_precision: this CPU would have to emulate bf16, so the run computes in float32, which is faster."
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    else:  # trained weights stay float32, as small updates would be lost to rounding, and so does a base that is merged
        dtype = torch.bfloat16 if has_bf16 and config.may_halve_base else torch.float32
    return Precision(dtype, autocast, use_cpu=not (cuda or mps), note=note)


def model_path(name: str) -> str:
    """Hub name or folder of `--model`; resolves aitrain's own names, and makes a model that is not there yet."""
    folder = named_folder(name)
    if folder is not None and name == SMOLLM2:
        from aitrain.training.smollm2 import make_smollm2  # here, because only this name needs it

        make_smollm2(folder)
    return name if folder is None else str(folder)


HUB_SECONDS = 5.0
"""Seconds within which the Hub has to answer."""


@contextmanager
def _loading(config: TrainConfig, folder: str | None = None) -> Iterator[str]:
    """Context that loads a model or parts of it, from a folder or the place of the model: without an answer of the Hub
    from its cache only, as transformers would go on asking for a minute and more.

    Raises:
        ConfigError: it cannot be loaded.
    """
    before, place = constants.HF_HUB_OFFLINE, folder or model_path(config.model)
    try:
        if not before and not os.path.isdir(place):
            constants.HF_HUB_OFFLINE = not _hub_answers(place)
        yield place
    except Exception as error:
        raise _cannot_load(config, error) from error
    finally:
        constants.HF_HUB_OFFLINE = before


@lru_cache(maxsize=8)
def _hub_answers(name: str) -> bool:
    """Whether the Hub answers a request for the model, with any status below 500; it is asked once."""
    url = f"{constants.ENDPOINT}/{name}/resolve/main/config.json"
    try:
        answer: httpx.Response = get_session().head(url, timeout=HUB_SECONDS, follow_redirects=False)
    except httpx.TransportError:
        return False
    return answer.status_code < 500


def load_tokenizer(config: TrainConfig, folder: str | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding and truncating on the left, with a pad token; that of `folder`, if it is given.

    Raises:
        ConfigError: it cannot be loaded, or has no end-of-text token.
    """
    with _loading(config, folder) as place:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place,
            padding_side="left",
            truncation_side="left",
            trust_remote_code=config.trust_remote_code,
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model: the tokenizer of {config.model} has no end-of-text token: no completion could ever end.\n"
            "Set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # any token: padding is masked everywhere
    if (template := config.chat_template) is not None and template not in CHAT_TEMPLATES:
        try:
            tokenizer.chat_template = Path(template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            named = " nor ".join(CHAT_TEMPLATES)
            raise ConfigError(f"chat_template: {template} is neither {named} nor a readable file") from None
    elif template is not None:
        tokenizer.chat_template = CHAT_TEMPLATES[template]
    return tokenizer


def _cannot_load(config: TrainConfig, error: Exception) -> ConfigError:
    what = " ".join(str(error).split())
    if isinstance(try_to_load_from_cache(config.model, "adapter_config.json"), str):
        return adapter_error(config.model)
    return ConfigError(
        f"model: cannot load {config.model}: {what[:200] or type(error).__name__}\n"
        "Give a folder, or a name on the Hub (a gated one needs HF_TOKEN); `tiny` is always available."
    )


def adapter_error(name: str) -> ConfigError:
    """The error of an adapter on the Hub in place of a model."""
    return ConfigError(
        f"model: {name} is an adapter, not a model\n"
        f"Make it one: hf download {name} --local-dir adapter && aitrain export adapter --out model"
    )


def load_model(config: TrainConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Load the weights, from safetensors only, in the given dtype; quantized if the options ask for it.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    options: dict[str, object] = {"dtype": dtype, "use_safetensors": True, **_model_options(config)}
    if config.quantization == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif config.quantization is not None:
        compute = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
    options |= config.trl_table("model_init_kwargs")  # TRL loads the reference model with the same ones
    with _loading(config) as path:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, **options)
    disable_dropout(model)
    return model


def model_without_weights(config: TrainConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on torch's meta device, from its configuration alone: its modules and their sizes, in milliseconds.

    Raises:
        ConfigError: it cannot be made.
    """
    configuration = load_configuration(config)
    with _loading(config), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(configuration, dtype=dtype, **_model_options(config))
    return model


def load_configuration(config: TrainConfig) -> PretrainedConfig:
    """The configuration of the model.

    Raises:
        ConfigError: it cannot be loaded.
    """
    with _loading(config) as path:
        configuration: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    return configuration


def _model_options(config: TrainConfig) -> dict[str, object]:
    options: dict[str, object] = {"trust_remote_code": config.trust_remote_code}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    return options


def disable_dropout(model: PreTrainedModel) -> None:
    """Disable dropout and router noise: with them, the policy differs between forward passes, and from the reference.

    A model reads the probabilities from layers, from attributes of its modules or from its configuration. The modules
    get a changed copy of the configuration, so that the one saved with the model stays as it was.
    """
    copies: dict[int, object] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in list(_noise_of(module)):
            setattr(module, name, 0.0)
        config = None if module is model else vars(module).get("config")
        if config is not None and any(True for _ in _noise_of(config)):
            copies.setdefault(id(config), copy.deepcopy(config))
            module.config = copies[id(config)]
    for config in copies.values():
        for name in list(_noise_of(config)):
            setattr(config, name, 0.0)


def _noise_of(owner: object) -> Iterator[str]:
    """Names of attributes with a dropout or noise level above 0, such as `attn_pdrop` or `router_jitter_noise`."""
    for name, value in vars(owner).items():
        if isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name):
            yield name


def count_forward_passes(model: torch.nn.Module) -> None:
    """Count each forward pass as progress for the watchdog.

    With LoRA, `generate` calls the base model directly, without the hooks of the wrapper.
    """
    innermost(model).register_forward_pre_hook(activity.tick)


def keep_adapter_float32(model: torch.nn.Module) -> None:
    """Keep trained adapter weights in float32; on a quantized base TRL casts them to bfloat16, where updates of less
    than 0.4 % of a weight are lost to rounding."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Check that every token has an embedding; embeddings are never resized, and may be larger (Qwen).

    Raises:
        ConfigError: the tokenizer has more tokens than the model has embeddings.
    """
    weight = model.get_input_embeddings().weight
    known = weight.shape[0]
    if len(tokenizer) > known:
        raise ConfigError(
            f"model: the tokenizer has {len(tokenizer)} tokens, the model only {known}.\n"
            "Use the tokenizer of the model, or resize the embeddings and save the model first."
        )


def context_length(config: TrainConfig, configuration: PretrainedConfig) -> int | None:
    """Maximum tokens of prompt and completion together; None if neither option nor model sets it."""
    stated = getattr(configuration.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (config.model_max_length, stated) if limit]
    return min(limits) if limits else None


def lora_config(config: TrainConfig, model: PreTrainedModel) -> LoraConfig | None:
    """The adapter to train, or None for full fine-tuning.

    Raises:
        ConfigError: the model has not all of target_modules; peft passes over what it does not find.
    """
    if not config.peft:
        return None
    named = config.target_modules
    targets = [] if named == "all-linear" else [name.strip() for name in named.split(",")]
    layers = [f".{name}" for name, _ in model.named_modules()]
    for name in targets:
        if not any(layer.endswith(f".{name}") for layer in layers):
            near = did_you_mean(name, {layer.rpartition(".")[2] for layer in layers})
            raise ConfigError(f"target_modules: the model has no layer called {name}.{near}")
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets or named,
        bias="none",
        task_type="CAUSAL_LM",
    )
