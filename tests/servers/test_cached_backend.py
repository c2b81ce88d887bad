"""The sample cache between a task and a real server on loopback: who is asked, what is kept, in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback import Reply, Script, completion, loopback_server

from harness.backends.base import Failure, GenerateRequest, Generation, Request, Response, Sampling
from harness.backends.cached import CachedBackend, CacheMode
from harness.backends.server import RetryPolicy, ServerBackend
from harness.sample_identity import Identity
from harness.sample_store import SampleStore, is_stored

IDENTITY = Identity(engine="vllm", version="9.9", model="m", revision="0" * 40)
READ, WRITE, READWRITE = CacheMode.READ, CacheMode.WRITE, CacheMode.READWRITE


def requests(*prompts: object, **sampling: Any) -> list[GenerateRequest]:
    return [GenerateRequest(prompt=str(prompt), sampling=Sampling(max_tokens=8, **sampling)) for prompt in prompts]


def echo(body: dict[str, Any], n: int) -> Reply:
    """Answer with the prompt and the number of the asking, in an order that is not that of the questions."""
    return Reply(body=completion(f"{body['prompt']} {n}").body, delay=0.001 * (n * 7 % 11))


class Asked:
    """One asking through the cache, and what came of it."""

    def __init__(self, folder: Path, mode: CacheMode, asked: Sequence[Request], *, script: Script = echo, **more: Any):
        self.answers: dict[int, Response] = {}
        self.order: list[int] = []
        self._stop_after = more.pop("stop_after", None)
        with loopback_server(script) as server, SampleStore(folder, more.pop("identity", IDENTITY)) as store:
            inner = ServerBackend(server.base_url, model="m", retry=RetryPolicy(first_wait=0.0), concurrency=16)
            self.cached = CachedBackend(inner, store, mode, **more)
            asyncio.run(self._ask(asked))
        self.prompts = [request["prompt"] for request in server.requests]

    async def _ask(self, asked: Sequence[Request]) -> None:
        async with self.cached, aclosing(self.cached.run(asked)) as answers:
            async for index, response in answers:
                assert index not in self.answers
                self.answers[index] = response
                self.order.append(index)
                if len(self.order) == self._stop_after:
                    break

    @property
    def texts(self) -> list[str | None]:
        """The texts in the order of the questions."""
        found = [self.answers[index] for index in sorted(self.answers)]
        return [answer.text if isinstance(answer, Generation) else None for answer in found]

    @property
    def counted(self) -> tuple[int, int, int]:
        return self.cached.hits, self.cached.misses, self.cached.stored


def test_a_second_run_asks_nothing(tmp_path: Path) -> None:
    """The same questions of the same identity are answered as before, without one request; latencies are the old."""
    first = Asked(tmp_path, READWRITE, requests(*range(50)))
    second = Asked(tmp_path, READWRITE, requests(*range(50)))
    assert (len(first.prompts), second.prompts) == (50, [])
    assert first.texts == second.texts
    assert (first.counted, second.counted) == ((0, 50, 50), (50, 0, 0))
    assert second.answers == {index: replace(answer, attempts=0) for index, answer in first.answers.items()}
    assert all(map(is_stored, second.answers.values()))
    assert not any(map(is_stored, first.answers.values()))


def test_a_thousand_in_a_thousand_out(tmp_path: Path) -> None:
    """However hits and misses are mixed and in whatever order the server answers, answer i belongs to question i."""
    Asked(tmp_path, WRITE, requests(*range(0, 1000, 3)))
    run = Asked(tmp_path, READWRITE, requests(*range(1000)))
    assert [(text or "").split()[0] for text in run.texts] == [str(n) for n in range(1000)]
    assert run.counted == (334, 666, 666)
    assert sorted(map(int, run.prompts)) == [n for n in range(1000) if n % 3]
    assert run.order[:334] == list(range(0, 1000, 3))
    assert run.order[334:] != sorted(run.order[334:])


def test_another_identity_is_asked(tmp_path: Path) -> None:
    """What one version answered is no answer of the next."""
    Asked(tmp_path, READWRITE, requests("a"))
    other = Asked(tmp_path, READWRITE, requests("a"), identity=replace(IDENTITY, version="10"))
    assert other.prompts == ["a"]


def test_another_setting_is_asked(tmp_path: Path) -> None:
    """What was answered with one seed is no answer with another."""
    Asked(tmp_path, READWRITE, requests("a", seed=1))
    assert Asked(tmp_path, READWRITE, requests("a", seed=2)).prompts == ["a"]


def test_each_pass_is_asked_once(tmp_path: Path) -> None:
    """A second pass is to show how answers vary: the first's are none of its own, and a second run repeats both."""
    passes = [Asked(tmp_path, READWRITE, requests("a"), pass_number=number) for number in (1, 2, 1, 2)]
    assert [run.prompts for run in passes] == [["a"], ["a"], [], []]


def test_repeated_questions_keep_their_own_draws(tmp_path: Path) -> None:
    """Several draws of one question stay several, in a second run as in the first."""
    first = Asked(tmp_path, READWRITE, requests("a", "b", "a", "a", temperature=1.0))
    second = Asked(tmp_path, READWRITE, requests("a", "b", "a", "a", temperature=1.0))
    assert first.texts == second.texts
    assert len(set(first.texts)) == 4
    assert second.prompts == []


def test_reading_never_writes(tmp_path: Path) -> None:
    """Misses are asked and not kept, and nothing in the folder changes but the time of use."""
    Asked(tmp_path, READ, requests("a"))
    assert list(tmp_path.iterdir()) == []
    Asked(tmp_path, WRITE, requests("a"))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    run = Asked(tmp_path, READ, requests("a", "b"))
    assert (run.prompts, run.counted) == (["b"], (1, 1, 0))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_writing_never_reads(tmp_path: Path) -> None:
    """Everything is asked anew, and the new answers replace the old."""
    Asked(tmp_path, WRITE, requests("a"), script=lambda body, n: completion("old"))
    again = Asked(tmp_path, WRITE, requests("a"), script=lambda body, n: Reply(body=completion("new").body, delay=0.01))
    assert (again.prompts, again.counted) == (["a"], (0, 1, 1))
    assert Asked(tmp_path, READ, requests("a")).texts == ["new"]


FAULTS = {
    "rejected": Reply(status=400, body={"error": {"message": "no"}}),
    "500": Reply(status=500),
    "not-json": Reply(body="<html>"),
    "aborted": completion("half an ans", finish_reason="abort"),
    "cut": Reply(body=completion("x").body, cut=10),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failures_are_never_stored(fault: str, tmp_path: Path) -> None:
    """A question that got no answer is asked again by the next run; the others are not."""

    def script(body: dict[str, Any], n: int) -> Reply:
        return FAULTS[fault] if body["prompt"] == "bad" else completion("x")

    first = Asked(tmp_path, READWRITE, requests("a", "bad", "b"), script=script)
    assert isinstance(first.answers[1], Failure)
    assert first.counted == (0, 3, 2)
    second = Asked(tmp_path, READWRITE, requests("a", "bad", "b"))
    assert (second.prompts, second.counted) == (["bad"], (2, 1, 1))


def test_a_run_that_is_stopped_keeps_what_it_had(tmp_path: Path) -> None:
    """Leaving early stops the inner backend, and every answer that was handed on is there the next time."""
    first = Asked(tmp_path, READWRITE, requests(*range(200)), stop_after=20)
    assert (first.cached.stored, len(first.prompts) < 200) == (20, True)
    second = Asked(tmp_path, READ, requests(*range(200)))
    assert second.order[:20] == sorted(first.order)
    assert second.cached.hits == 20


def test_the_rest_of_the_contract_is_the_inner_backends(tmp_path: Path) -> None:
    """What answers is described by the backend that is asked; entering and leaving are its own."""

    async def described() -> tuple[Any, ...]:
        with loopback_server(echo) as server, SampleStore(tmp_path, IDENTITY) as store:
            async with ServerBackend(server.base_url, model="m") as inner:
                cached = CachedBackend(inner, store, READWRITE)
                info = await cached.describe()
                await cached.check_context(requests("a"), info)
                answers = [answer async for answer in cached.run(requests("a"))]
                return info == await inner.describe(), cached.kinds == inner.kinds, len(answers), cached.facts()

    same, kinds, answered, facts = asyncio.run(described())
    assert (same, kinds, answered) == (True, True, 1)
    assert facts == {"mode": "readwrite", "identity": IDENTITY.digest(), "hits": 0, "misses": 1, "stored": 1}
