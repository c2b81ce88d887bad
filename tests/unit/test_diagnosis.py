"""The likely cause is named from what servers really print."""

from __future__ import annotations

import pytest

from harness.servers.diagnosis import likely_cause, port_in_use

CASES = [
    pytest.param("vllm: error: unrecognized arguments: --frob 3", "--frob 3", id="unknown argument"),
    pytest.param("serve: error: argument --dtype: invalid choice: 'fp3'", "argument --dtype", id="bad value"),
    pytest.param("OSError: [Errno 98] Address already in use", "port is in use", id="port"),
    pytest.param(
        "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "port is in use",
        id="port of torch.distributed",
    ),
    pytest.param("OSError: [Errno 28] No space left on device", "disk is full", id="disk"),
    pytest.param(
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url https://x",
        "gated",
        id="gated",
    ),
    pytest.param(
        "RepositoryNotFoundError: 401 Client Error. (Request ID: x) Repository Not Found for url: https://x",
        "does not exist",
        id="no such repository",
    ),
    pytest.param(
        "OSError: /models/x is not a local folder and is not a valid model identifier listed on 'https://hf.co/models'",
        "does not exist",
        id="no such folder",
    ),
    pytest.param("LocalEntryNotFoundError: outgoing traffic has been disabled", "not in the cache", id="offline"),
    pytest.param(
        "ValueError: To serve at least one request with the model's max seq len (131072), (16.00 GiB KV "
        "cache is needed, which is larger than the available KV cache memory (9.51 GiB). Try",
        "--max-model-len",
        id="context",
    ),
    pytest.param(
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored",
        "--max-model-len",
        id="context, older words",
    ),
    pytest.param(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has",
        "memory is exhausted",
        id="CUDA",
    ),
    pytest.param("torch.OutOfMemoryError: HIP out of memory. Tried", "memory is exhausted", id="HIP"),
    pytest.param("RuntimeError: CUDA error: out of memory", "memory is exhausted", id="CUDA error"),
    pytest.param(
        "ValueError: No available memory for the cache blocks. Try", "memory is exhausted", id="no cache blocks"
    ),
    pytest.param(
        "ValueError: Free memory on device cuda:0 (10.1/79.2 GiB) on startup is less than desired GPU "
        "memory utilization",
        "which other process",
        id="device already full",
    ),
    pytest.param(
        "RuntimeError: CUDA error: no kernel image is available for execution", "GPU or its driver", id="kernel"
    ),
    pytest.param("RuntimeError: Failed to infer device type", "GPU or its driver", id="no device"),
    pytest.param("ModuleNotFoundError: No module named 'flashinfer'", "(flashinfer)", id="package"),
    pytest.param(
        "ImportError: libcudart.so.12: cannot open shared object file: No such file", "libcudart.so.12", id="library"
    ),
    pytest.param("loading\nkilled by SIGKILL (signal 9)", "host memory", id="killed"),
    pytest.param("Traceback\nMemoryError", "host memory", id="host memory"),
]


@pytest.mark.parametrize(("log", "says"), CASES)
def test_cause_is_named(log: str, says: str) -> None:
    """A fault that people meet often is named, with a remedy, in one line."""
    cause = likely_cause(f"INFO starting\n{log}\nINFO bye")
    assert cause is not None
    assert says in cause
    assert "\n" not in cause


@pytest.mark.parametrize(
    "log",
    [
        "",
        "INFO 11-30 16:02 [api_server.py:1] vLLM API server version 0.32.0",
        "INFO Port 20481 is already in use, trying port 20482",
        "WARNING Address already in use. Retrying with a new port.",
        "INFO HF_HUB_OFFLINE is True, replace model_id [a/b] to model_path [/cache/a/b]",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "exited with code 1",
    ],
)
def test_no_cause_is_made_up(log: str) -> None:
    """What says nothing about a cause gives none, and neither does a port that vLLM merely stepped over."""
    assert likely_cause(log) is None
    assert not port_in_use(log)


def test_what_says_most_comes_first() -> None:
    """The cause is named rather than what follows from it."""
    log = "OSError: [Errno 28] No space left on device\nModuleNotFoundError: No module named 'x'\nkilled by SIGKILL"
    cause = likely_cause(log)
    assert cause is not None
    assert "disk is full" in cause


def test_braces_in_the_log() -> None:
    """What a log says is shown as it stands, also where it looks like a format."""
    cause = likely_cause("error: unrecognized arguments: --config {0} {x}")
    assert cause is not None
    assert "--config {0} {x}" in cause
