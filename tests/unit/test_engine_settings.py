"""Settings that engines share, translated to each engine's own option."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from harness.config import ModelConfig
from harness.engine_settings import EngineSettings

ALL = {
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "gpu_memory_fraction": 0.5,
    "max_batched_tokens": 8192,
    "tensor_parallel_size": 2,
    "seed": 7,
    "input": "text",
}


def config(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"model_name": "m", "accuracy_threshold": 0.5, **keys})


def test_vllm_gets_its_own_flags() -> None:
    """Each shared setting becomes the option that vLLM gives it."""
    said = " ".join(EngineSettings(**ALL).flags("vllm"))
    assert said == (
        "--dtype bfloat16 --max-model-len 4096 --gpu-memory-utilization 0.5 --max-num-batched-tokens 8192 "
        "--tensor-parallel-size 2 --seed 7 --language-model-only"
    )


def test_sglang_gets_its_own_flags() -> None:
    """The same settings become SGLang's options."""
    said = " ".join(EngineSettings(**ALL | {"input": "vision"}).flags("sglang"))
    assert said == (
        "--dtype bfloat16 --context-length 4096 --mem-fraction-static 0.5 --chunked-prefill-size 8192 "
        "--tp-size 2 --random-seed 7 --enable-multimodal"
    )


def test_what_one_engine_alone_knows_passes_through() -> None:
    """Options keep the engine's names: true is a switch, false its denial, and structures are JSON."""
    options = {"enforce_eager": True, "enable-prefix-caching": False, "speculative_config": {"method": "ngram"}}
    flags = EngineSettings(options=options).flags("vllm")
    assert flags == ("--enforce-eager", "--no-enable-prefix-caching", "--speculative-config", '{"method": "ngram"}')


def test_settings_reach_the_command_after_the_configs_own_arguments() -> None:
    """`server_args` come first, and the parallel size counts for the GPUs that are needed."""
    both = config(server_args="--enforce-eager", engine={"tensor_parallel_size": 4})
    assert both.arguments == ("--enforce-eager", "--tensor-parallel-size", "4")
    assert both.gpus == 4
    assert config(backend="sglang", engine={"tensor_parallel_size": 4}).gpus == 4
    assert config(backend="sglang", server_args="--tp 2 --dp-size 2").gpus == 4
    assert config(backend="sglang", server_args="--tp 2 --dp-size 2 --enable-dp-attention").gpus == 2


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"server_args": "--max-model-len 1", "engine": {"max_model_len": 2}}, "--max-model-len is said by engine"),
        ({"server_args": "-tp 1", "engine": {"tensor_parallel_size": 2}}, "is said by engine, too: remove one"),
        ({"backend": "transformers", "server_args": "--x"}, "transformers has no command line: use engine.options"),
        ({"backend": "nobody"}, "backend nobody: there is none of that name; known: vllm, vllm-offline"),
        ({"backend": "openai", "task": "choice"}, "backend openai cannot answer task: choice"),
        (
            {"backend": "transformers", "serve_command": "x {model} {port} {args}"},
            "is for backend vllm or sglang alone",
        ),
        ({"backend": "sglang", "scoring_format": "echo"}, "scoring_format is for backend vllm alone"),
        ({"task": "perplexity"}, "max_bits_per_byte is missing"),
        ({"task": "perplexity", "max_bits_per_byte": 1.0, "gate": "paired"}, "has no right or wrong"),
        ({"task": "choice", "gen_prefix": "x"}, "gen_prefix says nothing to task: choice"),
        ({"max_bits_per_byte": 1.0}, "max_bits_per_byte is for task: perplexity"),
        ({"task": "perplexity", "max_bits_per_byte_increase": 0.1}, "max_bits_per_byte_increase needs a baseline"),
        (
            {"task": "perplexity", "max_bits_per_byte": 1.0, "max_window": 8, "window_context": 8},
            "a window of 8 tokens has no room for it",
        ),
        ({"gpu_share": 0.5, "num_gpus": 2}, "gpu_share is of one GPU, and this config takes 2"),
        ({"truncate_prompts": True, "use_chat_completions": True}, "truncate_prompts is for completions"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_starts(keys: dict[str, Any], said: str) -> None:
    """Each rule over several keys names the key and the way out."""
    with pytest.raises(ValidationError, match=re.escape(said)):
        config(**keys)
