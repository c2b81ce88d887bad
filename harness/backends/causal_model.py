"""A causal language model of transformers in memory with its tokenizer: what the backend must know and may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from harness.backends.hf_tokenizer import SANE_LENGTH, HfTokenizer
from harness.backends.tokens import Vocabulary
from harness.errors import ConfigError

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


class CausalModel:
    """The model stays its owner's: what `asking` changes is put back."""

    def __init__(
        self, model: Any, tokenizer: Any, *, device: str | None = None, max_model_len: int | None = None
    ) -> None:
        """`device` is where it is asked; where it is, if None.

        Raises ConfigError for a model that is not causal, and where neither it nor the caller tells its length.
        """
        self.model: Any = bare(model)
        self.tokenizer = tokenizer
        self.encoder = HfTokenizer(tokenizer)
        self._device = device
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise ConfigError(f"{type(self.model).__name__} has an encoder: backend transformers asks causal models")
        self.max_model_len = max_model_len or model_length(self.model.config, tokenizer)

    @property
    def device(self) -> Any:
        """Where tokens go: a model spread over devices takes them at its embeddings."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return self.encoder.vocabulary(self.max_model_len)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a reply: those of the generation config and, as with servers, the tokenizer's."""
        given = self.model.generation_config.eos_token_id
        listed = given if isinstance(given, list | tuple) else [given]
        return tuple(dict.fromkeys(int(token) for token in [*listed, self.tokenizer.eos_token_id] if token is not None))

    @cached_property
    def padding(self) -> int:
        """Return a token to fill rows with; it is masked, so any will do."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else next(iter(self.ends), 0)

    def release(self) -> None:
        """Let go of the model, whoever still holds this."""
        self.model = None

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Put the model into evaluation mode and on its device; mode, module by module, and device are restored."""
        modes = [(module, module.training) for module in self.model.modules()]
        before = self.device
        self.model.eval()
        try:
            if self._device is not None:
                self.model.to(self._device)
            yield
        finally:
            for module, training in modes:
                module.training = training
            if self._device is not None:
                self.model.to(before)

    def padded(self, rows: Sequence[Sequence[int]], *, width: int, left: bool) -> Mapping[str, Any]:
        """Make `input_ids` and `attention_mask` of rows, filled up on one side."""
        import torch

        ids = torch.full((len(rows), width), self.padding, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for number, row in enumerate(rows):
            place = slice(width - len(row), width) if left else slice(0, len(row))
            ids[number, place] = torch.tensor(row, dtype=torch.long)
            mask[number, place] = 1
        return {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}


def bare(model: Any) -> Any:
    """Take off what data-parallel training wraps around a model."""
    while not hasattr(model, "generate") and hasattr(model, "module"):
        model = model.module
    return model


def model_length(config: Any, tokenizer: Any) -> int:
    """Find how many tokens a model was made for.

    Raises ConfigError where neither its configuration nor its tokenizer tells.
    """
    text = config.get_text_config()
    lengths = (getattr(text, key, None) for key in LENGTH_KEYS)
    for length in (*lengths, getattr(tokenizer, "model_max_length", None)):
        if isinstance(length, int) and 0 < length < SANE_LENGTH:
            return length
    raise ConfigError(f"{type(config).__name__} does not tell the model's length: give max_model_len")
