"""A Hugging Face tokenizer behind the rules of `harness.backends.tokens`."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from typing import Any

from harness.backends.tokens import Piece, Vocabulary
from harness.errors import ConfigError
from harness.own_environment import changed_environment

SANE_LENGTH = 10**9
"""transformers says 10**30 for a tokenizer that names no longest text."""


class HfTokenizer:
    """Encodes pieces with a tokenizer of transformers, or the one that vLLM's `LLM.get_tokenizer()` returns.

    It may be used from several threads.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizers panic ("Already borrowed") where threads share one.
        self._lock = threading.Lock()
        # Without it, a text longer than the model draws a warning, although windows and cuts come afterwards.
        quiet = "verbose" in inspect.signature(type(tokenizer).__call__).parameters
        self._options = {"verbose": False} if quiet else {}

    @classmethod
    def load(cls, source: str, *, trust_remote_code: bool, local_only: bool = False) -> HfTokenizer:
        """Load from a folder, the local cache or, unless `local_only`, the hub.

        Raises ConfigError with the remedy.
        """
        how = {"trust_remote_code": trust_remote_code, "local_files_only": local_only}
        try:
            with changed_environment():
                return cls(_transformers(source).AutoTokenizer.from_pretrained(source, **how))
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ConfigError(
                f"tokenizer {source}: cannot be loaded here ({_first_line(error)}): name a folder that holds the "
                "tokenizer's files, or fetch them into the local cache first"
            ) from error

    def encoded(self, pieces: Iterable[Piece]) -> dict[Piece, tuple[int, ...]]:
        """Encode each piece, whole however long it is."""
        tokens: dict[Piece, tuple[int, ...]] = {}
        wanted = list(dict.fromkeys(pieces))
        for special in (True, False):
            batch = [piece for piece in wanted if piece.special is special]
            tokens.update(zip(batch, self._encode(batch, special), strict=True))
        return tokens

    def _encode(self, batch: list[Piece], special: bool) -> list[tuple[int, ...]]:
        if not batch:
            return []
        with self._lock:
            output = self._tokenizer([piece.text for piece in batch], add_special_tokens=special, **self._options)
        return [tuple(map(int, ids)) for ids in output["input_ids"]]

    def vocabulary(self, max_model_len: int) -> Vocabulary:
        """Return what the scoring rules must know, for a model of that length."""
        return Vocabulary(
            bos=_id(self._tokenizer, "bos_token_id"),
            eos=_id(self._tokenizer, "eos_token_id"),
            max_model_len=max_model_len,
        )


def context_length(source: str, *, trust_remote_code: bool) -> int | None:
    """Return the longest sequence that a model's local configuration allows; None where it does not tell."""
    try:
        config = _transformers(source).AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (ConfigError, OSError, ValueError, ImportError, KeyError):
        return None
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and 0 < length < SANE_LENGTH else None


def _transformers(source: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"tokenizer {source}: transformers is not installed here: pip install transformers"
        ) from error
    return transformers


def _id(tokenizer: Any, name: str) -> int | None:
    value = getattr(tokenizer, name, None)
    return int(value) if value is not None else None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
