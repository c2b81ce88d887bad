"""The keys of a config that concern scoring: log-likelihoods of choices and of whole texts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from harness.tasks.scores import ChoiceScore

BitsPerByte = Annotated[float, Field(gt=0)]


class ScoringKeys(BaseModel):
    """What `task: choice` and `task: perplexity` are told."""

    choice_score: ChoiceScore = Field(
        default=ChoiceScore.PER_BYTE,
        strict=False,
        description="choice: what is compared: log-likelihoods as they are (sum), per_token or per_byte.",
    )
    pairwise_tokenization: bool = Field(
        default=False, description="choice: encode context and continuation apart, instead of the whole, then split."
    )
    move_trailing_spaces: bool = Field(
        default=True, description="choice: spaces at the context's end go before the continuation instead."
    )
    max_window: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="perplexity: tokens a window may hold; the model's length less one where left out."
    )
    window_context: Annotated[int, Field(ge=1)] = Field(
        default=1, description="perplexity: tokens of earlier text that each further window sees again, unscored."
    )
    max_bits_per_byte: BitsPerByte | None = Field(
        default=None, description="perplexity: more bits per byte over all documents than this is a regression."
    )
    max_bits_per_byte_increase: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="perplexity: a real increase over the baseline beyond this is a regression."
    )
    numeric_noise: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Changes of the mean score up to this are numeric noise; 0.001 bits per byte or 0.01 nats.",
    )
    truncate_prompts: bool = Field(
        default=False, description="Completions: cut prompts that leave no room for max_tokens from the left."
    )
    scoring_format: Literal["prompt_logprobs", "echo"] = Field(
        default="prompt_logprobs",
        description="backend vllm: how likelihoods are asked for; `echo` is the older OpenAI way, for other servers.",
    )
    tokenizer: str | None = Field(
        default=None, description="For scoring over HTTP: the model's tokenizer, where it is not the model's own."
    )
