"""Stands in for vLLM: an LLM with an engine process of its own, which has the fault that its arguments name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "0.0.fake"


def run_engine(fault: str | None, ready: Any) -> None:
    """Be the engine's process."""
    print(f"the engine begins; secret is {os.environ.get('MY_API_KEY')}", flush=True)
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    if fault == "dies":
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", flush=True)
        sys.exit(1)
    if fault != "slow":
        ready.set()
    time.sleep(300)


class LLM:
    """Waits for its engine as vLLM does, and leaves a variable behind as vLLM does."""

    def __init__(self, *, model: str, fault: str | None = None, **keywords: Any) -> None:
        os.environ["LEFT_BY_VLLM"] = "1"
        os.environ["HOME_OF_TEST"] = "changed by vLLM"
        print("the LLM begins")
        if fault == "refuses":
            raise ValueError("User-specified max_model_len (8192) is greater than the derived max_model_len (4096)")
        context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
        ready = context.Event()
        self.process = context.Process(target=run_engine, args=(fault, ready))
        self.process.start()
        while not ready.wait(0.05):
            if not self.process.is_alive():
                raise RuntimeError("Engine core initialization failed. See root cause above.")
        self.keywords = {"model": model, **keywords}
        self.told: list[Any] = []
        self.model_config = SimpleNamespace(model=model)
        core = SimpleNamespace(shutdown=self._shutdown, resources=SimpleNamespace(engine_dead=False))
        self.llm_engine = SimpleNamespace(engine_core=core)

    def collective_rpc(self, method: str) -> list[str | None]:
        if method == "unknown":
            raise AttributeError(method)
        return [None, "rank 1 is ill"] if method == "ill" else [None, None]

    def _shutdown(self) -> None:
        Path(os.environ["SHUTDOWN_NOTE"]).touch()
        self.process.terminate()
        self.process.join(0.2)
