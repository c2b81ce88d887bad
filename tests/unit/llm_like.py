"""Stands in for `vllm.LLM`: requests are queued as there, and an engine answers some of them at each step."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any


@dataclass(kw_only=True)
class SamplingParams:
    """What the backend sets of vLLM's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: list[int] = field(default_factory=list)
    max_tokens: int = 16
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    prompt_logprobs: int | None = None
    detokenize: bool = True


@dataclass(kw_only=True)
class Asked:
    """One request as the engine got it."""

    name: str
    prompt: Any
    parameters: SamplingParams
    chat: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Reply:
    """What the engine makes of one request."""

    text: str = ""
    finish_reason: str = "stop"
    tokens: int = 3
    spoil: Callable[[list[Any]], Any] = lambda entries: entries
    """What goes wrong with the log probabilities of the prompt."""


class TokenizerLike:
    """One token a word with the spaces before it; ids in the order in which words are first seen."""

    bos_token_id = 1
    eos_token_id = 2

    def __init__(self) -> None:
        self.words: list[str] = ["<unknown>", "<bos>", "<eos>"]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self._id(word) for word in re.findall(r"\s*\S+|\s+", text)]

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True, **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def _id(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """As in vLLM."""

    logprob: float
    rank: int | None


def likelihood(before: int, token: int) -> Logprob:
    """How likely this model finds a token after another: some are its first choice, with ranks up to 3."""
    rank = 1 + (before * 31 + token * 7) % 3
    return Logprob(logprob=-rank - token / 1024, rank=rank)


def prompt_logprobs(tokens: Sequence[int]) -> list[dict[int, Logprob] | None]:
    """Score a prompt as vLLM does when asked for one alternative: nothing before its first token."""
    return [None, *(_entries(token, likelihood(before, token)) for before, token in pairwise(tokens))]


def _entries(token: int, found: Logprob) -> dict[int, Logprob]:
    best = {} if found.rank == 1 else {10**6: Logprob(logprob=-0.5, rank=1)}
    return {token: found, **best}


def echo(asked: Asked) -> Reply | None:
    return Reply(text=str(asked.prompt))


class EngineLike:
    """Finishes a random half of its requests a step; one whose answer is None is never finished."""

    def __init__(self, answer: Callable[[Asked], Reply | None]) -> None:
        self.pending: list[Asked] = []
        self.aborted: list[str] = []
        self.most = 0
        self.threads: set[str] = set()
        self.log_stats = True
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))
        self.before_step: Callable[[], None] = lambda: None
        self._answer = answer
        self._random = random.Random(0)

    def get_num_unfinished_requests(self) -> int:
        return len(self.pending)

    def step(self) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        self.most = max(self.most, len(self.pending))
        self.before_step()
        self._random.shuffle(self.pending)
        taken = self.pending[: (len(self.pending) + 1) // 2]
        outputs = [self._output(asked, self._answer(asked)) for asked in taken]
        done = {output.request_id for output in outputs if output.finished}
        self.pending = [asked for asked in self.pending if external(asked.name) not in done]
        return outputs

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        self.pending = [asked for asked in self.pending if external(asked.name) not in names]

    def _output(self, asked: Asked, reply: Reply | None) -> Any:
        name = external(asked.name)
        if reply is None:
            return SimpleNamespace(request_id=name, finished=False, outputs=[], prompt_token_ids=[])
        written = SimpleNamespace(text=reply.text, finish_reason=reply.finish_reason, token_ids=[0] * reply.tokens)
        tokens = asked.prompt["prompt_token_ids"] if isinstance(asked.prompt, dict) else [0] * 7
        scored = asked.parameters.prompt_logprobs is not None
        return SimpleNamespace(
            request_id=name,
            finished=True,
            outputs=[written],
            prompt_token_ids=tokens,
            prompt_logprobs=reply.spoil(prompt_logprobs(tokens)) if scored else None,
        )


class LlmLike:
    """An LLM whose engine answers as a function says."""

    def __init__(self, answer: Callable[[Asked], Reply | None] = echo, **defaults: Any) -> None:
        """`defaults` are the sampling settings of the model's generation config."""
        self.llm_engine = EngineLike(answer)
        self.model_config = SimpleNamespace(
            model="models/like",
            dtype="torch.float32",
            max_model_len=100,
            quantization=None,
            revision=None,
            generation_config="auto",
            override_generation_config={},
        )
        self.default_sampling_params: dict[str, Any] = defaults
        self.refuse: Callable[[Any], None] = lambda prompt: None
        self.metrics: list[Any] = []
        self.tokenizer = TokenizerLike()
        self._count = 0

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.default_sampling_params)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def get_metrics(self) -> list[Any]:
        return self.metrics

    def enqueue(self, prompts: list[Any], parameters: SamplingParams, *, use_tqdm: bool) -> list[str]:
        return [self._add(prompt, parameters, {}) for prompt in prompts]

    def enqueue_chat(
        self, messages: list[Any], parameters: SamplingParams, *, use_tqdm: bool, **chat: Any
    ) -> list[str]:
        return [self._add(conversation, parameters, chat) for conversation in messages]

    def _add(self, prompt: Any, parameters: SamplingParams, chat: dict[str, Any]) -> str:
        self.refuse(prompt)
        name = f"{self._count}-{self._count:08x}"
        self._count += 1
        self.llm_engine.pending.append(Asked(name=name, prompt=prompt, parameters=parameters, chat=chat))
        return name


def external(name: str) -> str:
    """The name that an output bears: vLLM adds a suffix to the one it was given."""
    return name.partition("-")[0]
