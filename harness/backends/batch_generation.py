"""Text for a batch of prompts padded on the left, each sampled, stopped and cut as a server would do it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.backends.base import Sampling
from harness.backends.causal_model import CausalModel

OVERLAP = 6
"""Tokens of the prompt that a reply is decoded with: some tokenizers drop the space before a text's first word."""
NEUTRAL = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_length": None,
    "return_dict_in_generate": False,
    "use_cache": True,
}
"""What must not come from the model's own generation config; its penalties and suppressed tokens stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """A prompt to continue."""

    index: int
    """Its request's place among all."""
    tokens: tuple[int, ...]
    cut: int
    sampling: Sampling
    seed: int

    @property
    def length(self) -> int:
        return len(self.tokens) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one row became."""

    text: str
    tokens: int
    """Generated ones, the end token or the stop string's included."""
    finish_reason: Literal["stop", "length"]


def generate_rows(
    causal: CausalModel, rows: Sequence[GenerationRow], *, stopped: Callable[[], bool]
) -> list[Written] | None:
    """Continue rows of one sampling; None where `stopped` turned true meanwhile."""
    sampling = rows[0].sampling
    width = max(len(row.tokens) for row in rows)
    endings = _Endings(causal, rows, width, stopped)
    draw = _draw(causal, rows)
    output = causal.model.generate(
        **causal.padded([row.tokens for row in rows], width=width, left=True),
        generation_config=_generation_config(causal, sampling),
        stopping_criteria=[endings],
        logits_processor=[draw] if draw is not None else [],
    )
    if stopped():
        return None
    return [endings.written(number, tokens[width:]) for number, tokens in enumerate(output.tolist())]


def _generation_config(causal: CausalModel, sampling: Sampling) -> Any:
    config = copy.deepcopy(causal.model.generation_config)
    for name, value in NEUTRAL.items():
        setattr(config, name, value)
    config.max_new_tokens = sampling.max_tokens
    config.eos_token_id = list(causal.ends) or None
    config.pad_token_id = causal.padding
    return config


class _Endings:
    """Tells which rows are done, and remembers after how many tokens each was."""

    def __init__(
        self, causal: CausalModel, rows: Sequence[GenerationRow], width: int, stopped: Callable[[], bool]
    ) -> None:
        self._causal = causal
        self._rows = rows
        self._width = width
        self._stopped = stopped
        self._stop = rows[0].sampling.stop
        # A stop string spans at most as many tokens as it has bytes; what stands before it only has to be seen through.
        self._tail = max((len(text.encode()) for text in self._stop), default=0) + OVERLAP
        self._ended: list[int | None] = [None] * len(rows)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        if self._stopped():
            return torch.ones(len(self._rows), dtype=torch.bool, device=input_ids.device)
        new = input_ids[:, self._width :]
        for number, recent in enumerate(new[:, -self._tail :].tolist()):
            if self._ended[number] is None and self._ends(number, recent, new):
                self._ended[number] = new.shape[1]
        done = [ended is not None for ended in self._ended]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    def _ends(self, number: int, recent: list[int], new: Any) -> bool:
        if recent[-1] in self._causal.ends:
            return True
        if not self._stop or self._cut_at(_decoded(self._causal.tokenizer, recent)) is None:
            return False
        return self._cut_at(self._text(number, new[number].tolist())) is not None

    def _text(self, number: int, tokens: list[int]) -> str:
        return reply_text(self._causal.tokenizer, self._rows[number].tokens, tokens)

    def _cut_at(self, text: str) -> int | None:
        return min((place for stop in self._stop if (place := text.find(stop)) >= 0), default=None)

    def written(self, number: int, tokens: list[int]) -> Written:
        ended = self._ended[number]
        kept = tokens[:ended]
        text = self._text(number, kept)
        return Written(
            text=text[: self._cut_at(text)], tokens=len(kept), finish_reason="length" if ended is None else "stop"
        )


def reply_text(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Decode a reply as what it adds to its prompt."""
    before = list(prompt[-OVERLAP:])
    head, whole = _decoded(tokenizer, before), _decoded(tokenizer, [*before, *tokens])
    return whole[len(head) :] if whole.startswith(head) else _decoded(tokenizer, tokens)


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _draw(causal: CausalModel, rows: Sequence[GenerationRow]) -> Callable[[Any, Any], Any] | None:
    """Make what draws each row's next token from its own seed, whoever shares its batch; None for greedy decoding.

    torch's generator for all stays untouched: a training loop may be using it.
    """
    sampling = rows[0].sampling
    defaults = causal.model.generation_config.to_diff_dict()
    temperature = _given(sampling.temperature, defaults.get("temperature"), 1.0)
    if temperature == 0:
        return None
    import torch

    warpers = _warpers(sampling, defaults, temperature)
    generators = [torch.Generator(causal.device).manual_seed(row.seed) for row in rows]

    def draw(input_ids: Any, scores: Any) -> Any:
        for warper in warpers:
            scores = warper(input_ids, scores)
        chances = scores.float().softmax(dim=-1)
        noise = torch.empty_like(chances)
        for number, generator in enumerate(generators):
            noise[number].exponential_(generator=generator)
        # The largest of chance over exponential noise is each token with its chance, and needs no common generator.
        chosen = (chances / noise).argmax(dim=-1, keepdim=True)
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen, 0.0)

    return draw


def _warpers(sampling: Sampling, defaults: dict[str, Any], temperature: float) -> list[Any]:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    top_k = _given(sampling.top_k, defaults.get("top_k"), 0)
    top_p = _given(sampling.top_p, defaults.get("top_p"), 1.0)
    min_p = _given(defaults.get("min_p"), 0.0)
    warpers: list[Any] = [TemperatureLogitsWarper(float(temperature))] if temperature != 1 else []
    warpers += [TopKLogitsWarper(int(top_k))] if top_k > 0 else []
    warpers += [TopPLogitsWarper(float(top_p))] if top_p < 1 else []
    warpers += [MinPLogitsWarper(float(min_p))] if min_p > 0 else []
    return warpers


def _given(*values: Any) -> Any:
    """Return the first that is not None."""
    return next(value for value in values if value is not None)
