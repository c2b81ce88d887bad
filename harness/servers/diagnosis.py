"""Names the likely cause of a server's end from what it last printed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A fault people meet often, and what to do about it."""

    pattern: re.Pattern[str]
    remedy: str
    """One line; `{}` stands for what the pattern's group matched."""

    def explain(self, text: str) -> str | None:
        found = self.pattern.search(text)
        return self.remedy.format(*found.groups(default="")) if found else None


# vLLM says "Address already in use. Retrying with a new port." of ports it merely tries, and goes on.
_PORT = r"(?:address already in use(?!\. Retrying)|EADDRINUSE|\[Errno 98\])"

_MEASURED_NEIGHBOURS = r"Error in memory profiling\. Initial (?:free|used) memory"
_SHARING = (
    (_MEASURED_NEIGHBOURS, "a neighbour on its GPU gave memory back while vLLM measured its own"),
    (r"No available memory for the cache blocks", "memory profiling counted its neighbours on the GPU"),
    (r"less than desired GPU memory utilization", "a neighbour on its GPU held more than its share for a moment"),
)


def _cause(pattern: str, remedy: str) -> Cause:
    return Cause(pattern=re.compile(pattern, re.IGNORECASE | re.MULTILINE), remedy=remedy)


# In order: what says most stands first, for an exhausted memory or a lost process shows many faces later in a log.
_CAUSES = (
    _cause(
        r"error: (unrecognized arguments: .{1,200}|argument .{1,200}|the following arguments are required: .{1,200})",
        "the server does not know an option or its value ({}): check server_args against its --help",
    ),
    _cause(
        _PORT,
        "its port is in use: end the other process or let the harness choose the port",
    ),
    _cause(
        r"no space left on device|\[Errno 28\]|\bENOSPC\b|disk quota exceeded",
        "a disk is full: look at df -h for the model cache, /tmp and /dev/shm",
    ),
    _cause(
        r"GatedRepoError|cannot access gated repo|gated repo\b|access to model .{1,200} is restricted",
        "the model is gated: accept its licence on its page and set HF_TOKEN to an account that did",
    ),
    _cause(
        r"OfflineModeIsEnabled|offline mode is enabled|outgoing traffic has been disabled|LocalEntryNotFoundError"
        r"|couldn't connect to '?https://huggingface\.co",
        "the model is not in the cache and the hub cannot be reached: fetch it first, or unset HF_HUB_OFFLINE",
    ),
    _cause(
        r"RepositoryNotFoundError|RevisionNotFoundError|Repository Not Found|40[13] Client Error"
        r"|is not a local folder and is not a valid model identifier|Invalid repository ID or local directory",
        "the model or its revision does not exist or this HF_TOKEN may not read it: check model_name and the token",
    ),
    _cause(
        r"max seq len\b.{0,300}larger than|max_model_len\b.{0,100}greater than the derived max_model_len",
        "the context is too long for the model or the memory left for it: lower --max-model-len",
    ),
    _cause(
        r"no kernel image is available|CUDA driver version is insufficient|unsupported toolchain"
        r"|No CUDA GPUs are available|No HIP GPUs are available|Found no NVIDIA driver|Failed to infer device type"
        r"|compute capability.{0,80}not supported|only supported on GPUs with compute capability"
        r"|not supported on (?:this|the current) (?:GPU|device|platform)|invalid device function",
        "this GPU or its driver cannot run what was asked: check driver, build, quantization and kernels",
    ),
    _cause(
        r"(?:CUDA|HIP|XPU|NPU|torch)\S*(?: error:)? out of memory|torch\.\w*OutOfMemoryError|hipErrorOutOfMemory"
        r"|CUDA_ERROR_OUT_OF_MEMORY|No available memory for the cache blocks|less than desired \w+ memory utilization",
        "the device's memory is exhausted: see which other process holds it, or lower --gpu-memory-utilization, "
        "--max-model-len or --max-num-seqs",
    ),
    _cause(
        _MEASURED_NEIGHBOURS,
        "another process gave GPU memory back while vLLM measured its own: start again, or say gpu_share",
    ),
    _cause(
        r"No module named ['\"]?([\w.]+)|ImportError: (.{1,200}(?:cannot open shared object file|undefined symbol))",
        "a package is missing or does not fit the others ({}{}): install it in the server's environment",
    ),
    _cause(
        r"Cannot allocate memory|std::bad_alloc|^MemoryError|oom-kill|Out of memory: Killed process"
        r"|killed by SIGKILL|\bexit(?:ed with)? code:? (?:-9|137)\b",
        "most likely the kernel ended it for want of host memory: see dmesg, and free memory or take a smaller model",
    ),
)


def likely_cause(log_tail: str) -> str | None:
    """Return a cause with its remedy in one line; None when the text shows none that is known."""
    return next((said for cause in _CAUSES if (said := cause.explain(log_tail))), None)


def port_in_use(log_tail: str) -> bool:
    """Tell whether the server ended because its port was taken: then another port may do."""
    return re.search(_PORT, log_tail, re.IGNORECASE) is not None


def disturbed_by_neighbours(log_tail: str) -> str | None:
    """Say how the others on a shared GPU ended the server, where another start may do; None where they did not."""
    return next((said for pattern, said in _SHARING if re.search(pattern, log_tail, re.IGNORECASE)), None)
