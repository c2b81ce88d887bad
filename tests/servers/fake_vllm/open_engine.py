"""Opens an engine as a user's process would, and tells what it saw as one line of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from harness.backends.offline_engine import offline_engine
from harness.config import ModelConfig
from harness.servers.leftovers import VARIABLE


def marked() -> list[int]:
    """Every process that bears the engine's mark, by what it inherited."""
    mark = os.environ[VARIABLE]
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE) == mark:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def main() -> None:
    server_args, then = sys.argv[1:]
    config = ModelConfig(
        model_name="m",
        accuracy_threshold=0.5,
        server_args=server_args,
        env={"FROM_CONFIG": "1", "MY_API_KEY": "a-secret-of-ours"},
        startup_max_wait_seconds=2.0 if "slow" in server_args else 60.0,
    )
    before = (dict(os.environ), list(sys.path))
    saw: dict[str, Any] = {}
    try:
        with offline_engine(config, Path("server.log"), env={"CUDA_VISIBLE_DEVICES": "3"}) as engine:
            saw["marked"] = marked()
            saw["env"] = {name: os.environ.get(name) for name in ("FROM_CONFIG", "CUDA_VISIBLE_DEVICES", "VLLM_PORT")}
            saw["keywords"] = engine.llm.keywords
            saw["described"] = engine.description
            saw["chat"] = engine.chat
            if then == "check":
                saw["gates"] = [gate.verdict for gate in engine.check_workers(["well", "ill"])]
                engine.check_workers(["unknown"])
            if then == "die":
                print(json.dumps(saw), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if then == "raise":
                raise KeyboardInterrupt
            if then == "cancel":
                engine.cancelled.set()
            if then == "death":
                saw["alive"] = engine.death()
                engine.llm.llm_engine.engine_core.resources.engine_dead = True
                saw["dead"] = engine.death()
    except BaseException as error:  # noqa: BLE001 - it is told
        saw["raised"] = [type(error).__name__, str(error)]
    saw["restored"] = before == (dict(os.environ), list(sys.path))
    print(json.dumps(saw), flush=True)


if __name__ == "__main__":
    main()
