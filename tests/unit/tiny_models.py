"""Tiny random transformers models with a tokenizer of their own, and what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from harness.backends.base import GenerateRequest, Request, Response, Sampling
from harness.backends.transformers import TransformersBackend

VOCABULARY = 300
SENTENCE = "the quick brown fox jumps over a lazy dog while seven wizards box and vex some jolly queens"
WORDS = tuple(SENTENCE.split())
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if loud %}LOUD {% endif %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_tokenizer() -> Any:
    """Train a small byte-level tokenizer on the spot."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def make_model(kind: str = "llama", *, seed: int = 0, **settings: Any) -> Any:
    """Make a tiny random model with large weights, so that its choices are clear."""
    import torch
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(
            **shape, intermediate_size=64, initializer_range=0.3, tie_word_embeddings=False, **settings
        ),
        "gpt2": lambda: transformers.GPT2Config(**shape, initializer_range=0.3, **settings),
        "opt": lambda: transformers.OPTConfig(
            **{**shape, "pad_token_id": 1}, ffn_dim=64, word_embed_proj_dim=32, init_std=0.3, **settings
        ),
    }
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(configs[kind]()).eval()


def ask(model: Any, tokenizer: Any, requests: Sequence[Request], **options: Any) -> list[Response]:
    """Ask everything and return the responses in the requests' order; each must come exactly once."""

    async def run() -> dict[int, Response]:
        answers: dict[int, Response] = {}
        async with TransformersBackend.from_model(model, tokenizer, **options) as backend:
            async for index, response in backend.run(requests):
                assert index not in answers
                answers[index] = response
        return answers

    answers = asyncio.run(run())
    assert sorted(answers) == list(range(len(requests)))
    return [answers[index] for index in range(len(requests))]


def text(words: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(words))


def prompt(words: int, start: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(prompt=text(words, start), sampling=Sampling(**{"max_tokens": 12, **sampling}))


class Memory:
    """Makes a model run out of memory past a number of tokens in one call, as the device does."""

    def __init__(self, model: Any, tokens: int, fault: Callable[[], BaseException]) -> None:
        self.shapes: list[tuple[int, int]] = []
        self._tokens = tokens
        self._fault = fault
        self._hook = model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, module: Any, args: Any, kwargs: Any) -> None:
        rows, width = kwargs["input_ids"].shape
        self.shapes.append((rows, width))
        if rows * width > self._tokens:
            raise self._fault()

    def remove(self) -> None:
        self._hook.remove()


def cuda_fault() -> BaseException:
    import torch

    return torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu_fault() -> BaseException:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory")
