"""How well a model foresees whole documents: bits per byte, and the perplexities that others report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from harness.backends.base import Failure, Response, RollingLoglikelihood, RollingRequest
from harness.gates.threshold import Gate, Verdict
from harness.jsonl import TextRow
from harness.tasks.base import Sample, Status, answer_as
from harness.tasks.gsm8k import digest, failed_sample

WORDS_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A set of documents, each scored whole; nothing is right or wrong."""

    name: str
    problems: Sequence[TextRow]
    context: int = 1
    """Tokens of earlier text that each window after the first sees again."""
    max_window: int | None = None
    """Tokens a window may hold; the model's length less one where None."""

    @cached_property
    def requests(self) -> tuple[RollingRequest, ...]:
        return tuple(
            RollingRequest(text=row.text, max_window=self.max_window, context=self.context) for row in self.problems
        )

    def score(self, index: int, response: Response) -> Sample:
        text = self.problems[index].text
        common: dict[str, Any] = {
            "index": index,
            "question": text,
            "gold": "",
            "attempts": response.attempts,
            "prompt_sha256": digest(text),
        }
        if isinstance(response, Failure):
            return failed_sample(_naming_the_document(response, index, text), common)
        rolled = answer_as(response, RollingLoglikelihood)
        nll = -rolled.logprob
        return Sample(
            **common,
            status=Status.OK,
            correct=False,
            scores={},
            text=None,
            extracted=None,
            found_by=None,
            finish_reason=None,
            generated_tokens=0,
            prompt_tokens=rolled.tokens,
            latency=rolled.latency,
            value=bits_per_byte(nll, rolled.bytes),
            measures={
                "nll": nll,
                "tokens": rolled.tokens,
                "bytes": rolled.bytes,
                "words": len(text.split()),
                "windows": rolled.windows,
            },
        )

    def describe(self) -> dict[str, Any]:
        """What the run record keeps: enough to tell two runs apart."""
        texts = digest("\0".join(digest(row.text) for row in self.problems))
        return {
            "name": self.name,
            "questions": len(self.problems),
            "fewshot": 0,
            "scorer": "bits per byte",
            "sampling": {
                "kind": "loglikelihood_rolling",
                "window_context": self.context,
                "max_window": self.max_window,
            },
            "prompts_sha256": texts,
            "questions_sha256": texts,
        }


def _naming_the_document(failure: Failure, index: int, text: str) -> Failure:
    """Say which document it was; a rejection stays as it is, for the same one of every document ends the run early."""
    if failure.kind == "rejected":
        return failure
    words = text.split()
    first = " ".join(words[:WORDS_NAMED]) + ("…" if len(words) > WORDS_NAMED else "")
    return replace(failure, detail=f"document {index} ({first!r}): {failure.detail}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What all documents say together; `nll`, in nats, and the counts are totals over them."""

    bits_per_byte: float
    """nll / (ln 2 * bytes): the same unit whatever the tokenizer."""
    token_perplexity: float | None
    """exp(nll / tokens): only models with one tokenizer compare; None where it is too large for a float."""
    word_perplexity: float | None
    """exp(nll / words), words being what white space separates; None where it is too large for a float."""
    nll: float
    tokens: int
    bytes: int
    words: int
    documents: int


def summary_of(measures: Iterable[Mapping[str, Any]]) -> Summary:
    """Add up the measures of the documents that were scored, so that a long one counts as its length.

    Raises ValueError where there are none.
    """
    rows = list(measures)
    if not rows:
        raise ValueError("no document was scored")
    nll = math.fsum(row["nll"] for row in rows)
    tokens, length, words = (sum(row[key] for row in rows) for key in ("tokens", "bytes", "words"))
    return Summary(
        bits_per_byte=bits_per_byte(nll, length),
        token_perplexity=_perplexity(nll, tokens),
        word_perplexity=_perplexity(nll, words),
        nll=nll,
        tokens=tokens,
        bytes=length,
        words=words,
        documents=len(rows),
    )


def bits_per_byte(nll: float, length: int) -> float:
    """Compute nll / (ln 2 * length), nll being in nats and length in bytes."""
    return nll / (math.log(2) * length)


def _perplexity(nll: float, units: int) -> float | None:
    try:
        return math.exp(nll / units)
    except OverflowError:
        return None


def judge_bits_per_byte(summary: Summary, maximum: float) -> Gate:
    """Compare the bits per byte over all documents with their maximum."""
    met = summary.bits_per_byte <= maximum
    shown = "beyond all figures" if summary.token_perplexity is None else f"{summary.token_perplexity:.4g}"
    message = (
        f"{summary.bits_per_byte:.4f} bits per byte over {summary.documents} documents ({summary.bytes} bytes, "
        f"{summary.tokens} tokens, token perplexity {shown}) {'meets' if met else 'is above'} the maximum {maximum:g}"
    )
    verdict = Verdict.PASS if met else Verdict.REGRESSION
    return Gate(
        name="bits per byte", verdict=verdict, message=message, measured=summary.bits_per_byte, required=maximum
    )
