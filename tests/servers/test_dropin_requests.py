"""One server, asked as vLLM's published script asks it and by this project with its reading: the same bytes.

The client here stands for the script: it knows that format alone and nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from loopback import LoopbackServer, Reply, completion, loopback_server

from harness.config import load_config_file
from harness.config_lists import listed
from harness.errors import Position
from harness.gates.threshold import Counts
from harness.pipeline import evaluate
from harness.records import ConfigRecord
from harness.serving import RunOptions

STOP = ["Question", "Assistant:", "<|separator|>"]
EXEMPLARS = [
    ("Ann has 3 pens and buys 4. How many has she?", "3 + 4 = <<3+4=7>>7 pens.\n#### 7"),
    ("A book costs $1,200. What do 2 cost?", "2 * 1,200 = 2,400\n#### 2,400"),
]
QUESTIONS = [
    ("What is 6 - 9?", "#### -3"),
    ('Zoë says "½ of 10 €" – how many € are that?', "#### 5"),
    ("Two lines:\n\tone is 1, two is 2.\nTheir sum?", "#### 3"),
    ("Emoji 🍎 cost 3 each; what do 5 cost? \\ / \u2028 <|end|>", "#### 15"),
    ("数字は7です。いくつですか?", "#### 7"),
]


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A progress line nobody looks at."""

    def stage(self, text: str) -> None: ...

    def answered(self, counts: Counts, total: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Data:
    """Questions and worked examples as JSON rows, in files both sides read."""

    questions: Path
    exemplars: Path
    keys: str
    """What a config says to ask them."""


def rows(path: Path, first: int) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:first]]


@pytest.fixture(params=["synthetic", "gsm8k"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Data:
    """Five questions that are hard to encode, or GSM8K's own first five where it is here."""
    if request.param == "gsm8k":
        folder: Path = request.getfixturevalue("gsm8k_dir")
        keys = "num_questions: 5\nnum_fewshot: 5\n"
        return Data(questions=folder / "test.jsonl", exemplars=folder / "train.jsonl", keys=keys)
    for name, pairs in (("q", QUESTIONS), ("e", EXEMPLARS)):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    keys = "dataset: q.jsonl\nfewshot_dataset: e.jsonl\nnum_fewshot: 2\n"
    return Data(questions=tmp_path / "q.jsonl", exemplars=tmp_path / "e.jsonl", keys=keys)


def script_prompts(data: Data, prefix: str) -> list[str]:
    """Render prompts in the published format."""
    shots = 5 if data.questions.name == "test.jsonl" else 2
    examples = "".join(
        f"Question: {row['question']}\nAnswer:{prefix} {row['answer']}\n\n" for row in rows(data.exemplars, shots)
    )
    return [f"{examples}Question: {row['question']}\nAnswer:{prefix}" for row in rows(data.questions, 5)]


async def ask_as_the_script(server: LoopbackServer, data: Data, settings: dict[str, Any], *, chat: bool) -> None:
    """Send what vLLM's script sends: optional keys in its order, only where they are set; a model in chat alone."""
    prefix = settings.get("gen_prefix", "")
    order = ["temperature", "seed", "top_p", "top_k", *(["reasoning_effort", "chat_template_kwargs"] if chat else [])]
    chosen = {"temperature": 0.0, "seed": 42, **settings}
    optional = {key: chosen[key] for key in order if chosen.get(key) is not None}
    async with aiohttp.ClientSession() as session:
        for prompt in script_prompts(data, prefix):
            body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
            body |= {"max_tokens": settings.get("max_tokens", 256), "stop": STOP}
            body |= {"model": "m"} if chat else {}
            path = "/v1/chat/completions" if chat else "/v1/completions"
            async with session.post(server.base_url + path, json={**body, **optional}) as reply:
                assert reply.status == 200


def ask_by_this_project(server: LoopbackServer, data: Data, settings: dict[str, Any], folder: Path) -> None:
    """Evaluate a config as the suite does."""
    path = folder / "c.yaml"
    keys = "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
    path.write_text(f"model_name: m\naccuracy_threshold: 0.5\nscorer: last-number\n{data.keys}{keys}")
    (entry,) = listed("c", load_config_file(path), Position(path=path))
    options = RunOptions(base_url=server.base_url, data_dir=data.questions.parent)
    result = evaluate(entry, ConfigRecord(folder / "record"), options, Silent())
    assert result.counts.graded == 5


def reply(body: dict[str, Any], n: int) -> Reply:
    if "prompt" in body:
        return completion("#### 7")
    return Reply(body={"choices": [{"message": {"content": "#### 7"}, "finish_reason": "stop"}], "usage": {}})


COMPLETIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "server's own sampling": {"temperature": None, "seed": None},
    "sampled": {"temperature": 0.7, "seed": 7, "max_tokens": 512, "top_p": 0.95, "top_k": 20},
    "prefix": {"gen_prefix": " Let's think."},
}
CHATS: dict[str, dict[str, Any]] = {
    **COMPLETIONS,
    "template and effort": {
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False, "a": {"ü": [1, None]}},
    },
}


def recorded(server: LoopbackServer) -> list[tuple[str, str, bytes]]:
    """What was sent: the path, the type and every byte of the body, in an order of its own."""
    sent = zip(server.paths, server.headers, server.raw, strict=True)
    return sorted((path, headers["Content-Type"], raw) for path, headers, raw in sent)


@pytest.mark.parametrize("settings", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completions_are_the_scripts_bytes(data: Data, settings: dict[str, Any], tmp_path: Path) -> None:
    """With `scorer: last-number` a server cannot tell this project from vLLM's script."""
    with loopback_server(reply) as theirs, loopback_server(reply) as ours:
        asyncio.run(ask_as_the_script(theirs, data, settings, chat=False))
        ask_by_this_project(ours, data, settings, tmp_path)
    assert len(recorded(ours)) == 5
    assert recorded(ours) == recorded(theirs)


@pytest.mark.parametrize("settings", CHATS.values(), ids=CHATS)
def test_chats_are_the_scripts_bytes(data: Data, settings: dict[str, Any], tmp_path: Path) -> None:
    """The same for conversations of one message, which name the model there, too."""
    with loopback_server(reply) as theirs, loopback_server(reply) as ours:
        asyncio.run(ask_as_the_script(theirs, data, settings, chat=True))
        ask_by_this_project(ours, data, {"use_chat_completions": True, **settings}, tmp_path)
    assert len(recorded(ours)) == 5
    assert recorded(ours) == recorded(theirs)
