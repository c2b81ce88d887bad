"""Few-shot word problems with a number for an answer: prompts in vLLM's format, and their scoring."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.backends.base import ChatMessage, Failure, GenerateRequest, Generation, Response
from harness.config import ModelConfig, Scorer
from harness.errors import ConfigError
from harness.jsonl import Row
from harness.tasks.answers import Grade, grade
from harness.tasks.base import Sample, Status, answer_as
from harness.tasks.sampling import sampling_facts, sampling_of

LINE_START_STOP = ("\nQuestion:",)
"""A bare "Question" empties a right reply that begins with "Questions Mark completed", as test row 138's own does."""
VLLM_STOP = ("Question", "Assistant:", "<|separator|>")
"""What vLLM's published script sends; its thresholds were calibrated with it."""


def fewshot_prompt(question: str, exemplars: Sequence[Row], gen_prefix: str = "") -> str:
    """Render a completion prompt, byte for byte as vLLM's GSM8K script does."""
    shots = "".join(f"Question: {e.question}\nAnswer:{gen_prefix} {e.answer}\n\n" for e in exemplars)
    return f"{shots}Question: {question}\nAnswer:{gen_prefix}"


def fewshot_turns(question: str, exemplars: Sequence[Row], gen_prefix: str = "") -> tuple[ChatMessage, ...]:
    """Render a conversation in which each exemplar is a turn of user and assistant."""
    turns: list[ChatMessage] = []
    for exemplar in exemplars:
        turns.append(ChatMessage(role="user", content=f"Question: {exemplar.question}"))
        turns.append(ChatMessage(role="assistant", content=f"Answer:{gen_prefix} {exemplar.answer}"))
    return (*turns, ChatMessage(role="user", content=f"Question: {question}"))


@dataclass(frozen=True, kw_only=True)
class WordProblems:
    """A set of problems, asked and scored as one config says."""

    name: str
    config: ModelConfig
    problems: Sequence[Row]
    exemplars: Sequence[Row]

    def __post_init__(self) -> None:
        both = {e.question for e in self.exemplars} & {p.question for p in self.problems}
        if both:
            raise ConfigError(f"a row is both worked example and question: {min(both)[:80]!r}")

    @cached_property
    def requests(self) -> tuple[GenerateRequest, ...]:
        return tuple(self._request(problem.question) for problem in self.problems)

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings in force: the config's own, else vLLM's with its reading, else the boundary."""
        if self.config.stop is not None:
            return tuple(self.config.stop)
        if self.config.scorer is Scorer.LAST_NUMBER:
            return VLLM_STOP
        return () if self.config.use_chat_completions else LINE_START_STOP

    def _request(self, question: str) -> GenerateRequest:
        config = self.config
        sampling = sampling_of(config, stop=self.stop)
        prompt = fewshot_prompt(question, self.exemplars, config.gen_prefix)
        if not config.use_chat_completions:
            return GenerateRequest(prompt=prompt, sampling=sampling, truncate_prompt=config.truncate_prompts)
        one_message = (ChatMessage(role="user", content=prompt),)
        turns = fewshot_turns(question, self.exemplars, config.gen_prefix)
        return GenerateRequest(
            prompt=turns if config.fewshot_as_multiturn else one_message,
            sampling=sampling,
            reasoning_effort=config.reasoning_effort,
            chat_template_kwargs=config.chat_template_kwargs,
        )

    def score(self, index: int, response: Response) -> Sample:
        problem = self.problems[index]
        common: dict[str, Any] = {
            "index": index,
            "question": problem.question,
            "gold": problem.answer,
            "attempts": response.attempts,
            "prompt_sha256": digest(self.requests[index].prompt),
        }
        if isinstance(response, Failure):
            return failed_sample(response, common)
        generation = answer_as(response, Generation)
        common |= facts_of(generation)
        if generation.refusal is not None:
            return refused_sample(common, scorers=(Scorer.NUMERIC.value, Scorer.LAST_NUMBER.value))
        graded = grade(generation.text, generation.finish_reason, problem.answer)
        scores = {
            Scorer.NUMERIC.value: graded.numeric_correct,
            Scorer.LAST_NUMBER.value: graded.last_number_correct,
        }
        return Sample(**common, **self._reading(graded), correct=scores[self.config.scorer.value], scores=scores)

    def _reading(self, graded: Grade) -> dict[str, Any]:
        """Say what was read, by the scorer that gates; vLLM's reading knows no truncation."""
        if self.config.scorer is Scorer.NUMERIC:
            found = graded.extraction
            return {"status": Status(found.status), "extracted": found.matched, "found_by": found.how.value}
        number = graded.last_number
        return {
            "status": Status.UNANSWERED if number is None else Status.OK,
            "extracted": None if number is None else str(number),
            "found_by": None if number is None else Scorer.LAST_NUMBER.value,
        }

    def describe(self) -> dict[str, Any]:
        """What the run record keeps: enough to ask the same again and to tell two runs apart."""
        prompts = digest("\0".join(digest(r.prompt) for r in self.requests))
        return {
            "name": self.name,
            "questions": len(self.problems),
            "fewshot": len(self.exemplars),
            "fewshot_prefix": fewshot_prompt("", self.exemplars, self.config.gen_prefix) if self.exemplars else "",
            "gen_prefix": self.config.gen_prefix,
            "max_concurrency": self.config.max_concurrency,
            "scorer": self.config.scorer.value,
            "sampling": sampling_facts(self.config, stop=self.stop, chat=self.config.use_chat_completions),
            "prompts_sha256": prompts,
            "questions_sha256": digest("\0".join(f"{p.question}\0{p.answer}" for p in self.problems)),
        }


def failed_sample(failure: Failure, common: Mapping[str, Any]) -> Sample:
    return Sample(
        **common,
        status=Status.ERROR,
        correct=False,
        scores={},
        text=None,
        extracted=None,
        found_by=None,
        finish_reason=None,
        generated_tokens=None,
        prompt_tokens=None,
        latency=None,
        error={"kind": failure.kind, "status": failure.status, "detail": failure.detail},
    )


def facts_of(generation: Generation) -> dict[str, Any]:
    """Say of a sample what does not depend on how it is graded."""
    return {
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "generated_tokens": generation.generated_tokens,
        "prompt_tokens": generation.prompt_tokens,
        "latency": generation.latency,
        "reasoning": generation.reasoning,
        "unanswered_because": generation.refusal,
        "prompt_tokens_cut": generation.prompt_tokens_cut,
    }


def refused_sample(common: Mapping[str, Any], *, scorers: Sequence[str]) -> Sample:
    """Make the sample of a response that is none: it counts as unanswered, whatever its text may hold."""
    return Sample(
        **common,
        status=Status.UNANSWERED,
        correct=False,
        scores=dict.fromkeys(scorers, False),
        extracted=None,
        found_by=None,
    )


def digest(prompt: str | Sequence[ChatMessage]) -> str:
    """Name a prompt by its sha256; turns are separated by NUL, which no prompt holds."""
    text = prompt if isinstance(prompt, str) else "\0".join(f"{m.role}\0{m.content}" for m in prompt)
    return hashlib.sha256(text.encode()).hexdigest()
