"""Telling that a device's memory ran out from every other fault, and getting it back."""

from __future__ import annotations

import gc

CPU_SIGNS = ("not enough memory", "DefaultCPUAllocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether torch raised this for want of memory: of an accelerator by its class, of the CPU by its words."""
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in CPU_SIGNS)


def release_memory() -> None:
    """Give unused memory back to the device; call it where no traceback holds the tensors any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
