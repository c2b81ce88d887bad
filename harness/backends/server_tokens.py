"""The tokens that a server's model reads a text as: from the tokenizer's files, else from the server itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from harness.backends.base import Failure, Json
from harness.backends.hf_tokenizer import HfTokenizer, context_length
from harness.backends.openai_http import excerpt
from harness.backends.posting import RetryPolicy, post
from harness.backends.tokens import PROBE, Piece, Vocabulary
from harness.errors import ConfigError, ServerError

COMPARED = Piece(text="A naïve café — 東京, ½ price 😀:\n\tdef f(x):  return x ** 2", special=True)
"""Encoded by server and files alike before the first score: tokenizers of two models hardly agree on it."""

Tokens = dict[Piece, tuple[int, ...]]


class Encoder(Protocol):
    """Encodes pieces for a server's model."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    async def encoded(self, pieces: Sequence[Piece]) -> Tokens | Failure: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _FromFiles:
    tokenizer: HfTokenizer
    vocabulary: Vocabulary

    async def encoded(self, pieces: Sequence[Piece]) -> Tokens | Failure:
        try:
            return await asyncio.to_thread(self.tokenizer.encoded, pieces)
        except (ValueError, TypeError) as error:
            return Failure(kind="rejected", detail=f"it cannot be encoded: {error}", attempts=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What `/tokenize` says of one piece."""

    tokens: tuple[int, ...]
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenService:
    """The server's own `/tokenize` and `/tokenizer_info`, as vLLM has them."""

    session: aiohttp.ClientSession
    root: str
    model: str
    retry: RetryPolicy

    async def told(self, piece: Piece) -> _Told | Failure:
        """Ask for one piece's tokens."""
        body = {"model": self.model, "prompt": piece.text, "add_special_tokens": piece.special}
        reply = await post(self.session, self.root + "/tokenize", body, self.retry)
        if isinstance(reply, Failure):
            return reply
        try:
            told = json.loads(reply.raw)
            length = told.get("max_model_len")
            tokens = tuple(map(int, told["tokens"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            detail = f"/tokenize: no tokens: {excerpt(reply.raw)}"
            return Failure(kind="invalid_response", detail=detail, attempts=reply.attempts, status=200)
        return _Told(tokens=tokens, max_model_len=length if isinstance(length, int) else None)

    async def special(self, name: str, info: dict[str, Json]) -> int | None:
        """Return the id of the special token that the tokenizer's configuration calls by that name."""
        written = info.get(name)
        written = written.get("content") if isinstance(written, dict) else written
        if not isinstance(written, str) or not written:
            return None
        told = await self.told(Piece(text=written, special=False))
        if isinstance(told, Failure) or len(told.tokens) != 1:
            raise ServerError(f"{self.root}/tokenize does not know {name} {written!r} as one token: {told}")
        return told.tokens[0]

    async def info(self) -> dict[str, Json] | None:
        """Fetch the tokenizer's configuration; None where the server does not offer it."""
        try:
            async with self.session.get(self.root + "/tokenizer_info") as reply:
                told = await reply.json(content_type=None) if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        return told if isinstance(told, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FromServer:
    service: TokenService
    vocabulary: Vocabulary
    probed: Tokens = field(default_factory=dict)
    """The pieces that every request needs again."""

    async def encoded(self, pieces: Sequence[Piece]) -> Tokens | Failure:
        tokens = dict(self.probed)
        for piece in pieces:
            if piece in tokens:
                continue
            told = await self.service.told(piece)
            if isinstance(told, Failure):
                return told
            tokens[piece] = told.tokens
            if piece.text == PROBE:
                self.probed[piece] = told.tokens
        return tokens


async def encoder_for(
    service: TokenService, source: str | None, *, trust_remote_code: bool, max_model_len: int | None
) -> Encoder:
    """Find what encodes for a server's model, and how long its texts may be where `max_model_len` is not known.

    Files that are here go first, then what the server itself offers, then the hub. Raises ServerError with the remedy
    where there is none of them, or where files and server disagree.
    """
    local = await asyncio.to_thread(_load, source, trust_remote_code, True)
    told = await service.told(COMPARED)
    if isinstance(told, Failure) and told.kind not in {"rejected", "invalid_response"} and told.status != 501:
        raise ServerError(f"{service.root}/tokenize: {told.detail}")
    length = max_model_len or (told.max_model_len if isinstance(told, _Told) else None)
    if isinstance(local, str) and isinstance(told, _Told) and (info := await service.info()) is not None:
        bos, eos = await service.special("bos_token", info), await service.special("eos_token", info)
        vocabulary = Vocabulary(bos=bos, eos=eos, max_model_len=_length(length, service.root))
        return _FromServer(service=service, vocabulary=vocabulary)
    if isinstance(local, str):
        local = await asyncio.to_thread(_load, source, trust_remote_code, False)
    if isinstance(local, str):
        raise ServerError(
            f"nothing encodes texts for {service.model}: {local}; set tokenizer to a folder or a name on the hub, or "
            "serve with --enable-tokenizer-info-endpoint"
        )
    if isinstance(told, _Told):
        _check_same(local.encoded([COMPARED])[COMPARED], told.tokens, source, service.root)
    if length is None and source is not None:
        length = await asyncio.to_thread(_configured_length, source, trust_remote_code)
    return _FromFiles(tokenizer=local, vocabulary=local.vocabulary(_length(length, service.root)))


def _load(source: str | None, trust_remote_code: bool, local_only: bool) -> HfTokenizer | str:
    """Load a tokenizer's files, or say why they are not to be had."""
    if source is None:
        return "no tokenizer is named, and the server does not offer /tokenize and /tokenizer_info"
    try:
        return HfTokenizer.load(source, trust_remote_code=trust_remote_code, local_only=local_only)
    except ConfigError as error:
        return str(error)


def _configured_length(source: str, trust_remote_code: bool) -> int | None:
    return context_length(source, trust_remote_code=trust_remote_code)


def _length(length: int | None, root: str) -> int:
    if length is None:
        raise ServerError(
            f"{root} does not tell max_model_len at /v1/models, and no model configuration is here: set tokenizer to "
            "the model's folder"
        )
    return length


def _check_same(ours: tuple[int, ...], theirs: tuple[int, ...], source: str | None, root: str) -> None:
    if ours != theirs:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise ServerError(
            f"the tokenizer {source} is not the one that {root} uses: from token {at} on they encode the same text as "
            f"{ours[at : at + 8]} and {theirs[at : at + 8]}: set tokenizer to the served model's own"
        )
