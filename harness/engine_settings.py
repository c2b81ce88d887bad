"""Settings that engines share, named once and translated to each engine's own option."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]

FLAGS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "dtype": "--dtype",
        "max_model_len": "--max-model-len",
        "gpu_memory_fraction": "--gpu-memory-utilization",
        "max_batched_tokens": "--max-num-batched-tokens",
        "tensor_parallel_size": "--tensor-parallel-size",
        "seed": "--seed",
    },
    "sglang": {
        "dtype": "--dtype",
        "max_model_len": "--context-length",
        "gpu_memory_fraction": "--mem-fraction-static",
        "max_batched_tokens": "--chunked-prefill-size",
        "tensor_parallel_size": "--tp-size",
        "seed": "--random-seed",
    },
}
INPUT_FLAGS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "vllm": {"text": ("--language-model-only",), "vision": ()},
    "sglang": {"text": (), "vision": ("--enable-multimodal",)},
}
ALIASES: Mapping[str, Sequence[str]] = {
    "--tensor-parallel-size": ("-tp",),
    "--tp-size": ("--tp", "--tensor-parallel-size"),
}


class EngineSettings(BaseModel):
    """How an engine runs a model, whichever engine it is; what is left out is the engine's own default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    dtype: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="float32, bfloat16, float16 or auto."
    )
    max_model_len: Positive | None = Field(default=None, description="Longest prompt and reply together, in tokens.")
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Share of each GPU's memory that weights and cache may take."
    )
    max_batched_tokens: Positive | None = Field(default=None, description="Most tokens computed in one step.")
    tensor_parallel_size: Positive | None = Field(default=None, description="GPUs that one replica is spread over.")
    seed: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="The engine's own seed, beside each request's."
    )
    input: Literal["text", "vision"] | None = Field(
        default=None, description="`text` leaves the vision part of a model unloaded where the engine can."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further options under the names that this engine gives them."
    )

    def flags(self, engine: str) -> tuple[str, ...]:
        """Write the settings as arguments of `engine`'s command line ("vllm" or "sglang")."""
        return tuple(self._flags(engine))

    def _flags(self, engine: str) -> Iterator[str]:
        for name, flag in FLAGS[engine].items():
            value = getattr(self, name)
            if value is not None:
                yield from (flag, str(value))
        if self.input is not None:
            yield from INPUT_FLAGS[engine][self.input]
        for name, value in self.options.items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                yield flag
            elif value is False:
                yield f"--no-{name.replace('_', '-')}"
            elif value is not None:
                yield from (flag, value if isinstance(value, str) else json.dumps(value))

    def said_twice(self, engine: str, arguments: Sequence[str]) -> str | None:
        """Name a flag that `arguments` holds although a setting here says it, or None."""
        given = {argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("-")}
        ours = [flag for flag in self.flags(engine) if flag.startswith("-")]
        return next((flag for flag in ours if given & {flag, *ALIASES.get(flag, ())}), None)
