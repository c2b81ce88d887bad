"""How the likelihoods of choices are compared; free of imports, so that configs can name it."""

from __future__ import annotations

from enum import StrEnum


class ChoiceScore(StrEnum):
    """What is compared between the choices of one question, in nats.

    `sum`: the log probability of the whole choice, which favors short ones.
    `per_token`: divided by its tokens, so that it depends on the tokenizer.
    `per_byte`: divided by its bytes in UTF-8, the same bytes whatever model and tokenizer read them.
    """

    SUM = "sum"
    PER_TOKEN = "per_token"
    PER_BYTE = "per_byte"
