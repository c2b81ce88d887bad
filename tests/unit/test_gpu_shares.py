"""What a config with a share of a GPU is told, and which shares are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.gpus.inventory import Gpu
from harness.gpus.memory import GIB
from harness.gpus.shares import MIB, check_share, memory_plan, share_arguments, weights_bytes
from harness.servers.launching import flag_value


def gpu(gib: float | None = 139.0, index: int = 0) -> Gpu:
    total = None if gib is None else round(gib * GIB)
    return Gpu(
        kind="cuda", index=index, uuid=f"GPU-{index}", name="H200", memory_total=total, arch="9.0", selector=str(index)
    )


def config(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"model_name": "org/Small-0.5B", "accuracy_threshold": 0.5, **keys})


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache that holds nothing."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def safetensors(path: Path, **tensors: tuple[str, int]) -> None:
    """Write a file whose header tells of tensors, by name, with dtype and bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_what_was_seen_to_work_fits() -> None:
    """Four models of half a billion on one H200 of 139 GiB, a fifth each: more than the 8 GiB of cache that worked."""
    told = share_arguments(config(), 0.2, gpu())
    cache = int(flag_value(told, "--kv-cache-memory-bytes") or 0)
    assert cache >= 8 * GIB
    assert cache % MIB == 0
    assert 0.1 < float(flag_value(told, "--gpu-memory-utilization") or 0) < 0.2


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25, 0.5, 0.99])
@pytest.mark.parametrize("gib", [24.0, 80.0, 139.0])
def test_the_parts_of_a_share_add_up_to_it(share: float, gib: float) -> None:
    """Weights, reserve and cache are the share of the memory, and what is asked to be free at the start is less."""
    plan = memory_plan(config(), share, gpu(gib))
    assert plan.budget - MIB < plan.weights + plan.reserve + plan.cache <= plan.budget
    assert plan.reserve >= 4 * GIB
    if plan.cache > 0:
        assert plan.utilization * plan.total <= plan.weights + plan.cache + plan.total / 1000


def test_shares_that_fill_a_gpu_never_ask_for_more_than_is_left() -> None:
    """When all neighbours have used up their shares, the last one still finds free what it asks for."""
    plan = memory_plan(config(), 0.25, gpu())
    assert plan.total - 3 * plan.budget >= plan.utilization * plan.total


def test_a_share_that_is_too_small_is_refused_with_one_that_is_enough() -> None:
    """The message tells the parts and the share that would do, which then does."""
    with pytest.raises(ConfigError, match=r"gpu_share: 0\.1 of GPU 0 \(H200\) is too small: .* take 0\.\d\d") as caught:
        share_arguments(config(model_name="org/Large-7B"), 0.1, gpu(80.0))
    enough = float(str(caught.value).rpartition("take ")[2].split()[0])
    assert share_arguments(config(model_name="org/Large-7B"), enough, gpu(80.0))
    with pytest.raises(ConfigError):
        share_arguments(config(model_name="org/Large-7B"), enough - 0.011, gpu(80.0))


OWN = {
    "both are its own": ("--kv-cache-memory-bytes 4G --gpu-memory-utilization 0.1", set()),
    "a cache of its own": ("--kv-cache-memory-bytes=4G", {"--gpu-memory-utilization"}),
    "underscores": ("--kv_cache_memory_bytes 4294967296", {"--gpu-memory-utilization"}),
    "neither": ("--max-model-len 4096", {"--gpu-memory-utilization", "--kv-cache-memory-bytes"}),
}


@pytest.mark.parametrize(("server_args", "added"), OWN.values(), ids=OWN)
def test_arguments_of_its_own_win(server_args: str, added: set[str]) -> None:
    """What the config says itself is not said again."""
    told = share_arguments(config(server_args=server_args), 0.25, gpu())
    assert {word for word in told if word.startswith("--")} == added


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "utilization alone": ({"server_args": "--gpu-memory-utilization 0.2"}, "counts its neighbours"),
    "engine setting alone": ({"engine": {"gpu_memory_fraction": 0.2}}, "counts its neighbours"),
    "cache beyond the share": ({"server_args": "--kv-cache-memory-bytes 40G"}, "more than its"),
    "a port of its own": ({"env": {"VLLM_PORT": "30000"}}, "VLLM_PORT"),
    "sglang": ({"backend": "sglang", "server_args": "--tp 1"}, "nothing keeps backend sglang"),
    "transformers": ({"backend": "transformers"}, "nothing keeps backend transformers"),
    "unknown size": ({"model_name": "org/mystery"}, "how large org/mystery is"),
    "unknown draft": ({"server_args": """--speculative-config '{"model": "org/draft"}'"""}, "how large org/draft is"),
}


@pytest.mark.parametrize(("keys", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_keep_to_a_share_is_refused(keys: dict[str, Any], says: str) -> None:
    """Nothing is started that would take what belongs to neighbours; the message names the remedy."""
    with pytest.raises(ConfigError, match=says):
        check_share(config(gpu_share=0.25, **keys), [gpu()])


def test_memory_that_is_not_known_is_refused() -> None:
    """Where the driver does not tell a GPU's memory, no share of it can be computed."""
    with pytest.raises(ConfigError, match="how much memory GPU 0"):
        check_share(config(gpu_share=0.25), [gpu(None)])


def test_every_gpu_it_may_get_must_do() -> None:
    """A run on unlike GPUs is refused for the smallest, before anything starts; whole GPUs are not looked at."""
    check_share(config(gpu_share=0.2), [gpu()])
    with pytest.raises(ConfigError, match="of GPU 1"):
        check_share(config(gpu_share=0.2), [gpu(), gpu(16.0, index=1)])
    check_share(config(), [gpu(1.0)])


NAMES = {
    "16 bits": ("org/Model-7B", "", 7e9 * 2, 7e9 * 2.4),
    "fp8": ("org/Model-7B-FP8", "", 7e9, 7e9 * 1.5),
    "on the fly": ("org/Model-7B", "--quantization fp8", 7e9, 7e9 * 1.5),
    "4 bits": ("org/Model-7B-AWQ", "", 3.5e9, 7e9 * 0.9),
    "float32": ("org/Model-7B", "--dtype float32", 28e9, 28e9 * 1.2),
    "with a draft": ("org/Model-7B", """--speculative-config '{"model": "org/Tiny-1B"}'""", 16e9, 8e9 * 2.4),
    "n-gram": ("org/Model-7B", """--speculative-config '{"method": "ngram"}'""", 14e9, 7e9 * 2.4),
}


@pytest.mark.parametrize(("name", "server_args", "least", "most"), NAMES.values(), ids=NAMES)
def test_weights_by_name(name: str, server_args: str, least: float, most: float) -> None:
    """A name's parameters by what each takes, rather too much than too little."""
    assert least <= weights_bytes(config(model_name=name, server_args=server_args)) <= most


def test_weights_of_a_folder(tmp_path: Path) -> None:
    """The tensors of all files count; the maker's second copy does not; float32 on 16 bits doubles the floats."""
    folder = tmp_path / "model-70b"
    safetensors(folder / "model-1.safetensors", a=("BF16", 1000), b=("I8", 500))
    safetensors(folder / "model-2.safetensors", c=("F32", 400))
    safetensors(folder / "consolidated.safetensors", a=("BF16", 1900))
    assert weights_bytes(config(model_name=str(folder))) == 1900
    assert weights_bytes(config(model_name=str(folder), server_args="--dtype float32")) == 2900


def test_weights_that_were_downloaded(no_hub: Path) -> None:
    """The hub's cache tells better than the name, for the revision that is asked for."""
    model = no_hub / "models--org--Small-0.5B"
    for revision, size in (("aaaa", 100), ("bbbb", 200)):
        safetensors(model / "snapshots" / revision / "model.safetensors", a=("BF16", size))
    (model / "refs").mkdir()
    (model / "refs/main").write_text("aaaa")
    assert weights_bytes(config()) == 100
    assert weights_bytes(config(server_args="--revision bbbb")) == 200


def test_files_that_tell_nothing_leave_the_name(tmp_path: Path) -> None:
    """A pointer of Git LFS in place of the weights is no size."""
    folder = tmp_path / "Model-7B"
    folder.mkdir()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert weights_bytes(config(model_name=str(folder))) > 14e9
