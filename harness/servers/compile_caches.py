"""Where compiled kernels are kept from one run to the next."""

from __future__ import annotations

from collections.abc import Mapping

from harness.cache import cache_root

FOLDERS = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def compile_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that name a stable folder for each cache, but for those that the user has set.

    Unlike versions share the folders and nothing in them: vLLM's own folders are named by a hash over its version, its
    code, its variables and the config; Inductor's entries by torch's version, its source and the device; Triton's by
    its source, the compiler and the target. What changes one of these compiles anew; the server's key is one of vLLM's
    variables, which is why it is kept (`launching.kept_key`).
    """
    root = cache_root() / "compile"
    return {name: str(root / folder) for name, folder in FOLDERS.items() if not environ.get(name)}
