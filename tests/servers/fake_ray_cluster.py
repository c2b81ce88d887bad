"""A Ray cluster of pretended nodes: prints its address, then obeys `remove NODE` and `add GPUS` on stdin.

Each node has GPUs of its own, at first two, that only its nvidia-smi knows, so that leases can be told apart.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster

MEMORY = 80 * 1024 * 1024


def tool_folder(folder: Path, name: str, gpus: int) -> Path:
    """Write a node's nvidia-smi."""
    rows = "".join(f"{n}, GPU-{name}{n}, 81559, 9.0, Disabled, NVIDIA H100\n" for n in range(gpus))
    tool = folder / name / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}END\n")
    tool.chmod(0o755)
    return tool.parent


def add_node(cluster: Cluster, folder: Path, name: str, gpus: int = 2) -> None:
    path = f"{tool_folder(folder, name, gpus)}{os.pathsep}{os.environ['PATH']}"
    leases = folder / f"leases-{name}"
    env = {"PATH": path, "ACCURACY_GATE_LEASES": str(leases)}
    cluster.add_node(num_cpus=8, num_gpus=gpus, object_store_memory=MEMORY, env_vars=env)


def main() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    folder = Path(tempfile.mkdtemp(prefix="ag-ray-", dir="/tmp"))  # short, for Ray's sockets
    os.environ["RAY_TMPDIR"] = os.environ["TMPDIR"] = str(folder)
    head = {"num_cpus": 0, "num_gpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        names = [f"node{n}" for n in range(int(sys.argv[1]))]
        for name in names:
            add_node(cluster, folder, name)
        print(f"address {cluster.address}", flush=True)
        for line in sys.stdin:
            word, _, value = line.strip().partition(" ")
            if word == "remove":
                (node,) = [node for node in cluster.worker_nodes if node.node_id.startswith(value)]
                cluster.remove_node(node, allow_graceful=False)
            else:
                names.append(f"node{len(names)}")
                add_node(cluster, folder, names[-1], int(value))
            print("done", flush=True)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
