"""What a server is told so that it keeps to its share of a GPU, and what is refused because it cannot."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends.registry import flags_of
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.gpus.inventory import Gpu
from harness.gpus.memory import GIB
from harness.model_size import model_size
from harness.servers.launching import flag_value

CACHE_FLAG = "--kv-cache-memory-bytes"
UTILIZATION_FLAG = "--gpu-memory-utilization"
FIXED_RESERVE = 4 * GIB
"""The CUDA context and the libraries' workspaces take about 1 GiB. Activations peak while vLLM tries its largest batch:
the scores of 1,024 sequences over 150,000 words are 0.6 GiB in float32, and sampling keeps several copies: about 2 GiB.
CUDA graphs take up to 1 GiB."""
RESERVE_PER_WEIGHT = 0.1
"""What grows with the model: weights that are repacked while they load, wider activations, more layers per graph."""
SMALLEST_CACHE = GIB
MIB = 1024**2
NAMED_BYTES = (
    (re.compile(r"fp4|int4|4-?bit|w4a|awq|gptq|bnb|[-_:.]q4", re.IGNORECASE), 0.75),
    (re.compile(r"fp8|int8|8-?bit|w8a|[-_:.]q8", re.IGNORECASE), 1.25),
)
"""Bytes per parameter as names and --quantization tell; more than 4 or 8 bits, for embeddings stay at 16."""
PLAIN_BYTES = 2.2
"""16 bits, and a tenth more because names round."""
FLOAT_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
_MULTIPLIERS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How a share of one GPU's memory is spent, in bytes."""

    total: int
    budget: int
    """The share's part of the whole."""
    weights: int
    reserve: int

    @property
    def cache(self) -> int:
        """What is left for the KV cache, in whole mebibytes; may be negative."""
        return (self.budget - self.weights - self.reserve) // MIB * MIB

    @property
    def utilization(self) -> float:
        """What vLLM must find free when it starts, as a share of the whole.

        Without it vLLM refuses to start unless nearly all memory is free. The reserve is left out: a part of it is
        taken already when vLLM looks, and neighbours may have used up theirs.
        """
        return max((self.budget - self.reserve) * 1000 // self.total, 1) / 1000

    def __str__(self) -> str:
        parts = (f"{size / GIB:.1f} GiB" for size in (self.budget, self.weights, self.reserve))
        return "{} less {} of weights and a reserve of {}".format(*parts)


def share_arguments(config: ModelConfig, share: float, gpu: Gpu) -> tuple[str, ...]:
    """Say what a server is told beside its own arguments to keep to its share of a GPU.

    The KV cache gets share x memory - weights - (4 GiB + a tenth of the weights), as an explicit number: where vLLM
    measures what is left it counts its neighbours. Arguments of the config's own win where they say as much. Raises
    ConfigError where they do not, or the share is too small.
    """
    _check_backend(config)
    if "VLLM_PORT" in config.env:
        raise ConfigError("env VLLM_PORT: with gpu_share each server counts up from a port of its own: remove it")
    utilization, cache = (flag_value(config.arguments, flag) for flag in (UTILIZATION_FLAG, CACHE_FLAG))
    if cache is None and utilization is not None:
        raise ConfigError(
            f"gpu_share: {UTILIZATION_FLAG} (engine.gpu_memory_fraction) makes vLLM measure what is left, and it "
            f"counts its neighbours: remove it, or say {CACHE_FLAG} beside it"
        )
    if cache is not None and utilization is not None:
        return ()
    plan = memory_plan(config, share, gpu)
    if cache is not None:
        _check_own_cache(cache, plan, share)
        return (UTILIZATION_FLAG, f"{plan.utilization:g}")
    if plan.cache < SMALLEST_CACHE:
        raise ConfigError(
            f"gpu_share: {share:g} of GPU {gpu.index} ({gpu.name}) is too small: {plan} leaves "
            f"{max(plan.cache, 0) / GIB:.1f} GiB for the KV cache, at least {SMALLEST_CACHE / GIB:g} GiB is needed: "
            f"take {_enough(plan):.2f} or more"
        )
    return (CACHE_FLAG, str(plan.cache), UTILIZATION_FLAG, f"{plan.utilization:g}")


def check_share(config: ModelConfig, gpus: Sequence[Gpu]) -> None:
    """Check, before anything starts, that a config can keep to its `gpu_share` on whichever GPU it gets.

    Raises ConfigError.
    """
    if config.gpu_share is None:
        return
    _check_backend(config)
    for gpu in gpus:
        share_arguments(config, config.gpu_share, gpu)


def memory_plan(config: ModelConfig, share: float, gpu: Gpu) -> MemoryPlan:
    """Divide a share of a GPU.

    Raises ConfigError where the GPU's memory or the model's size is not known.
    """
    if gpu.memory_total is None:
        raise ConfigError(
            f"gpu_share: how much memory GPU {gpu.index} ({gpu.name}) has is not known: say {CACHE_FLAG} and "
            f"{UTILIZATION_FLAG} in server_args"
        )
    weights = weights_bytes(config)
    reserve = FIXED_RESERVE + round(RESERVE_PER_WEIGHT * weights)
    return MemoryPlan(total=gpu.memory_total, budget=int(share * gpu.memory_total), weights=weights, reserve=reserve)


def weights_bytes(config: ModelConfig) -> int:
    """Tell how much memory the weights take, those of a draft model included: never less than they do, if in doubt.

    Raises ConfigError where neither files nor names tell.
    """
    arguments = config.arguments
    environ = {**os.environ, **config.env}
    models = [(config.model_name, flag_value(arguments, "--revision"))]
    drafting = _draft(flag_value(arguments, "--speculative-config"))
    if isinstance(drafting.get("model"), str):
        models.append((drafting["model"], drafting.get("revision")))
    dtype = flag_value(arguments, "--dtype")
    hint = flag_value(arguments, "--quantization") or flag_value(arguments, "-q") or ""
    return sum(_weights(name, revision, environ, dtype=dtype, hint=hint) for name, revision in models)


def _check_backend(config: ModelConfig) -> None:
    if flags_of(config.backend) != "vllm":
        raise ConfigError(
            f"gpu_share: nothing keeps backend {config.backend} to a share of a GPU: leave it out, or use backend vllm"
        )


def _check_own_cache(cache: str, plan: MemoryPlan, share: float) -> None:
    """Refuse a cache of the config's own that takes what belongs to neighbours; vLLM judges the spelling."""
    said = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", cache.strip())
    if said is None:
        return
    asked = float(said[1]) * _MULTIPLIERS[said[2]]
    if asked + plan.weights > plan.budget:
        raise ConfigError(
            f"gpu_share: {share:g}: {CACHE_FLAG} {cache} and {plan.weights / GIB:.1f} GiB of weights are more than its "
            f"{plan.budget / GIB:.1f} GiB: lower the one or raise the other"
        )


def _enough(plan: MemoryPlan) -> float:
    """The smallest share in hundredths that holds the smallest cache."""
    needed = plan.weights + plan.reserve + SMALLEST_CACHE + MIB
    return -(-needed * 100 // plan.total) / 100


def _draft(value: str | None) -> Mapping[str, Any]:
    try:
        read = json.loads(value) if value else {}
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _weights(name: str, revision: str | None, environ: Mapping[str, str], *, dtype: str | None, hint: str) -> int:
    for folder in (Path(name).expanduser(), _downloaded(name, revision, environ)):
        size = _size_of_files(folder, dtype)
        if size is not None:
            return size
    size_by_name = model_size(name)
    if size_by_name is None:
        raise ConfigError(
            f"gpu_share: how large {name} is cannot be told from files here or its name: say {CACHE_FLAG} and "
            f"{UTILIZATION_FLAG} in server_args"
        )
    wide = dtype in ("float", "float32")
    narrow = next((size for pattern, size in NAMED_BYTES if pattern.search(f"{name} {hint}")), PLAIN_BYTES)
    return round(size_by_name.total * 1e9 * (2 * PLAIN_BYTES if wide else narrow))


def _downloaded(name: str, revision: str | None, environ: Mapping[str, str]) -> Path:
    """Name the folder in the hub's cache where a model lies if it was downloaded."""
    home = environ.get("HF_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache/huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub") / f"models--{name.replace('/', '--')}"
    try:
        commit = (hub / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision or "main"
    return hub / "snapshots" / commit


def _size_of_files(folder: Path, dtype: str | None) -> int | None:
    """Add up the tensors of a model's folder, or the size of its one file; None where that tells nothing."""
    if folder.is_file():
        return folder.stat().st_size
    files = sorted(folder.glob("*.safetensors"))
    # Some folders hold the same weights once more in their maker's own layout.
    files = [path for path in files if not path.name.startswith("consolidated")] or files
    try:
        if files:
            return sum(_size_of_tensors(path, dtype) for path in files)
        return sum(path.stat().st_size for path in (*folder.glob("*.bin"), *folder.glob("*.gguf"))) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _size_of_tensors(path: Path, dtype: str | None) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path}: no header of safetensors")
        header = json.loads(file.read(length))
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        stored = FLOAT_BYTES.get(tensor["dtype"])
        total += (end - begin) * (4 // stored if stored is not None and dtype in ("float", "float32") else 1)
    return total
