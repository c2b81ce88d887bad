"""torch.compile for a model in memory: on while it is asked, with room for as many shapes as its batches have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SHAPES_A_BATCH = 2
"""Text costs two: its prompt, and then one token at a time."""
RECOMPILE_LIMITS = (
    ("recompile_limit", "cache_size_limit"),
    ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
)
"""Names of torch's limits, the newer first."""


@contextmanager
def compiled(model: Any, how: bool | str) -> Iterator[None]:
    """Compile a model's calls, True with torch's default backend, and undo it when the block is left."""
    if how is False:
        yield
        return
    before = model._compiled_call_impl
    model.compile(**({} if how is True else {"backend": how}))
    try:
        yield
    finally:
        model._compiled_call_impl = before


@contextmanager
def room_for_shapes(batches: int | None) -> Iterator[None]:
    """Raise torch's limit of compilations to what so many batches may need: past it, it silently compiles no more."""
    if batches is None:
        yield
        return
    import torch._dynamo

    config = torch._dynamo.config
    names = [next(name for name in both if hasattr(config, name)) for both in RECOMPILE_LIMITS]
    before = {name: getattr(config, name) for name in names}
    try:
        for name, limit in before.items():
            setattr(config, name, max(limit, batches * SHAPES_A_BATCH))
        yield
    finally:
        for name, limit in before.items():
            setattr(config, name, limit)
