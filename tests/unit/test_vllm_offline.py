"""Asking an LLM in process: answers as they finish, faults where they belong, and nothing that waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llm_like import Asked, LlmLike, Reply, SamplingParams

from harness.backends.base import ChatMessage, Failure, GenerateRequest, Generation, Response, Sampling
from harness.backends.llm_arguments import check_offline
from harness.backends.vllm_offline import VllmOfflineBackend, read_llm_counters
from harness.config import ModelConfig
from harness.errors import ConfigError, CountersUnavailable, ServerDied, ServerError
from harness.gates.threshold import Verdict
from harness.jsonl import read_jsonl
from harness.metrics import acceptance
from harness.offline import evaluate_offline
from harness.tasks.build import SHIPPED

HELLO = (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello"))


def requests(n: int, **sampling: Any) -> list[GenerateRequest]:
    return [GenerateRequest(prompt=f"q{i}", sampling=Sampling(max_tokens=8, **sampling)) for i in range(n)]


def ask(llm: LlmLike, asked: Sequence[GenerateRequest], **options: Any) -> dict[int, Response]:
    """Ask everything and return the responses by index."""

    async def run() -> dict[int, Response]:
        async with VllmOfflineBackend(llm, **options) as backend:
            return {index: response async for index, response in backend.run(asked)}

    return asyncio.run(run())


def given(llm: LlmLike, request: GenerateRequest, **options: Any) -> Asked:
    """Ask one request and return what the engine got."""
    seen: list[Asked] = []
    llm.llm_engine._answer = lambda asked: seen.append(asked) or Reply()  # type: ignore[func-returns-value]
    ask(llm, [request], **options)
    return seen[0]


def test_every_response_belongs_to_its_request() -> None:
    """A thousand answers from an engine that shuffles come back under the index of their question."""
    responses = ask(LlmLike(), requests(1000), concurrency=64)
    assert {i: r.text for i, r in responses.items() if isinstance(r, Generation)} == {i: f"q{i}" for i in range(1000)}


def test_concurrency_is_the_harnesss_own() -> None:
    """The engine never has more than `concurrency` requests, and has as many as that."""
    llm = LlmLike()
    ask(llm, requests(50), concurrency=8)
    assert llm.llm_engine.most == 8


def test_answers_come_before_the_last_is_finished() -> None:
    """A quick answer is handed on while a slow one is still being written."""
    release = threading.Event()
    llm = LlmLike(lambda asked: Reply(text="x") if asked.prompt == "q0" or release.is_set() else None)

    async def run() -> list[int]:
        order = []
        async with VllmOfflineBackend(llm, timeout=20.0) as backend:
            async for index, _ in backend.run(requests(3)):
                order.append(index)
                release.set()
        return order

    assert asyncio.run(run())[0] == 0


def test_a_step_does_not_stop_the_event_loop() -> None:
    """While the engine is in a step, other tasks run."""
    llm = LlmLike()
    ticked = threading.Event()
    in_time: list[bool] = []
    llm.llm_engine.before_step = lambda: in_time.append(ticked.wait(20))

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.05, ticked.set)
        async with VllmOfflineBackend(llm) as backend:
            _ = [answer async for answer in backend.run(requests(1))]

    asyncio.run(run())
    assert in_time == [True]


def test_a_generation_says_what_was_written() -> None:
    """Text, finish reason and token counts are the engine's; the latency is the request's own."""
    llm = LlmLike(lambda asked: Reply(text="42", finish_reason="length", tokens=8))
    llm.llm_engine.before_step = lambda: time.sleep(0.02)
    (response,) = ask(llm, requests(1)).values()
    assert isinstance(response, Generation)
    assert (response.text, response.finish_reason, response.generated_tokens) == ("42", "length", 8)
    assert (response.prompt_tokens, response.attempts) == (7, 1)
    assert response.latency >= 0.02


SAMPLINGS = [
    pytest.param({}, {}, {"temperature": 0.0}, id="harness-default"),
    pytest.param({"temperature": None}, {}, {"temperature": 1.0}, id="nobody-says"),
    pytest.param(
        {"temperature": None},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05},
        id="model-says",
    ),
    pytest.param(
        {"temperature": 0.2, "top_p": 0.5, "top_k": 7},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
        {"temperature": 0.2, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
        id="both-say",
    ),
    pytest.param({"seed": 3, "stop": ("\nQ", "X")}, {}, {"seed": 3, "stop": ["\nQ", "X"]}, id="seed-and-stop"),
    pytest.param({}, {"stop_token_ids": [5]}, {"stop_token_ids": [5]}, id="stop-tokens"),
    pytest.param({}, {"max_tokens": 4}, {"max_tokens": 8}, id="the-model's-length-is-no-limit"),
]


@pytest.mark.parametrize(("sampling", "model", "expected"), SAMPLINGS)
def test_sampling_settings_are_a_servers(
    sampling: dict[str, Any], model: dict[str, Any], expected: dict[str, Any]
) -> None:
    """What a request leaves out comes from the model's generation config, as over HTTP."""
    asked = given(LlmLike(**model), requests(1, **sampling)[0])
    assert {name: getattr(asked.parameters, name) for name in expected} == expected
    assert isinstance(asked.parameters, SamplingParams)


@pytest.mark.parametrize(
    ("generation_config", "override"),
    [("auto", {"max_new_tokens": 5}), ("models/other", {})],
    ids=["override", "folder"],
)
def test_a_length_set_on_purpose_is_a_limit(generation_config: str, override: dict[str, int]) -> None:
    """`--override-generation-config` and a generation config of one's own bound replies, as over HTTP."""
    llm = LlmLike(**({} if override else {"max_tokens": 5}))
    llm.model_config.generation_config = generation_config
    llm.model_config.override_generation_config = override
    assert given(llm, requests(1)[0]).parameters.max_tokens == 5


def test_mixed_settings_in_one_call() -> None:
    """Each request keeps its own sampling settings and its own kind."""
    llm = LlmLike(lambda asked: Reply(text=f"{asked.parameters.max_tokens} {asked.parameters.temperature}"))
    asked = [
        GenerateRequest(prompt="a", sampling=Sampling(max_tokens=1)),
        GenerateRequest(prompt=HELLO, sampling=Sampling(max_tokens=2, temperature=0.5)),
        GenerateRequest(prompt="b", sampling=Sampling(max_tokens=3, temperature=None)),
    ]
    assert [r.text for _, r in sorted(ask(llm, asked).items()) if isinstance(r, Generation)] == [
        "1 0.0",
        "2 0.5",
        "3 1.0",
    ]


TEMPLATES = [
    pytest.param({}, {}, {}, id="nothing"),
    pytest.param({"chat_template_kwargs": {"a": 1}}, {}, {"a": 1}, id="request"),
    pytest.param({"chat_template_kwargs": {"a": 1}}, {"a": 0, "b": 2}, {"a": 1, "b": 2}, id="request-over-default"),
    pytest.param(
        {"reasoning_effort": "high"}, {}, {"reasoning_effort": "high", "enable_thinking": True}, id="effort-thinks"
    ),
    pytest.param(
        {"reasoning_effort": "none"},
        {"enable_thinking": True},
        {"reasoning_effort": "none", "enable_thinking": False},
        id="no-effort",
    ),
    pytest.param(
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        {},
        {"reasoning_effort": "low", "enable_thinking": False},
        id="said-by-name",
    ),
]


@pytest.mark.parametrize(("request_says", "default", "expected"), TEMPLATES)
def test_conversations_go_through_the_chat_template(
    request_says: dict[str, Any], default: dict[str, Any], expected: dict[str, Any]
) -> None:
    """A conversation is handed to the chat call, its template's arguments merged as the server merges them."""
    request = GenerateRequest(prompt=HELLO, sampling=Sampling(max_tokens=8), **request_says)
    chat = {"chat_template_content_format": "string", "chat_template_kwargs": default}
    asked = given(LlmLike(), request, chat=chat)
    assert asked.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert asked.chat == {"chat_template_content_format": "string", "chat_template_kwargs": expected}


class VLLMClientError(Exception):
    """As in vLLM since 0.2x: no ValueError."""


@pytest.mark.parametrize("kind", [ValueError, TypeError, VLLMClientError])
def test_a_refused_request_is_its_own_fault(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that the engine will not take is rejected alone, with the engine's words."""
    monkeypatch.setitem(sys.modules, "vllm.exceptions", SimpleNamespace(VLLMClientError=VLLMClientError))
    llm = LlmLike()

    def refuse(prompt: Any) -> None:
        if prompt == "q2":
            raise kind("the prompt is longer than 100 tokens")

    llm.refuse = refuse
    responses = ask(llm, requests(5))
    assert responses.pop(2) == Failure(kind="rejected", detail="the prompt is longer than 100 tokens", attempts=1)
    assert sorted(responses) == [0, 1, 3, 4]
    assert all(isinstance(response, Generation) for response in responses.values())


def test_all_requests_refused() -> None:
    """Where the engine takes none there is nothing to step, and every request is answered for."""
    llm = LlmLike()
    llm.refuse = lambda prompt: int(prompt)  # type: ignore[assignment,return-value]
    responses = ask(llm, requests(3))
    assert [type(response) for response in responses.values()] == [Failure] * 3
    assert not llm.llm_engine.threads


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_request_is_a_failure(reason: str) -> None:
    """What the engine ended itself is no answer, whatever text there is."""
    (response,) = ask(LlmLike(lambda asked: Reply(text="half", finish_reason=reason)), requests(1)).values()
    assert response == Failure(kind="aborted", detail=f"the engine ended it: {reason}", attempts=1)


def test_a_request_that_takes_too_long_times_out_alone() -> None:
    """After the request's time-out it is aborted in the engine and called a timeout; the others are answered."""
    llm = LlmLike(lambda asked: None if asked.prompt == "q1" else Reply(text="x"))
    responses = ask(llm, requests(3), timeout=0.2)
    assert responses[1] == Failure(kind="timeout", detail="no answer within 0 s", attempts=1)
    assert [type(responses[i]) for i in (0, 2)] == [Generation, Generation]
    assert llm.llm_engine.aborted == ["1"]
    assert not llm.llm_engine.pending


def raising(error: Exception) -> Callable[[], None]:
    def step() -> None:
        raise error

    return step


def test_an_engine_that_fails_in_a_step_is_dead() -> None:
    """Whatever a step raises ends the run as an outage that names it."""
    llm = LlmLike()
    llm.llm_engine.before_step = raising(RuntimeError("CUDA error: device-side assert"))
    with pytest.raises(ServerDied, match="RuntimeError: CUDA error: device-side assert"):
        ask(llm, requests(2))


def test_an_engine_that_takes_nothing_is_dead() -> None:
    """An error of the engine itself while a request is handed over is no fault of the request."""
    llm = LlmLike()
    llm.refuse = lambda prompt: raising(RuntimeError("EngineCore encountered an issue"))()
    with pytest.raises(ServerDied, match="EngineCore encountered an issue"):
        ask(llm, requests(2))


def test_a_killed_engine_is_noticed_in_its_step() -> None:
    """vLLM's step never comes back from a killed engine: its death ends the run within 5 s, with the log's tail."""
    llm = LlmLike()
    release = threading.Event()
    llm.llm_engine.before_step = lambda: bool(release.wait(60)) and None
    died = time.monotonic() + 0.3

    def death() -> str | None:
        return "killed; the end of server.log: oom" if time.monotonic() > died else None

    with pytest.raises(ServerDied, match=r"killed; the end of server\.log: oom"):
        ask(llm, requests(2), death=death)
    assert time.monotonic() < died + 5
    release.set()


def test_the_death_is_read_off_the_engine() -> None:
    """Without anybody to say it, the engine's own mark of death is looked at."""
    llm = LlmLike()
    release = threading.Event()

    def die() -> None:
        llm.llm_engine.engine_core.resources.engine_dead = True
        release.wait(60)

    llm.llm_engine.before_step = die
    with pytest.raises(ServerDied, match="the engine's process is gone"):
        ask(llm, requests(2))
    release.set()


def test_a_hanging_engine_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that does not come back within the request's time-out ends the run."""
    monkeypatch.setattr("harness.backends.vllm_offline.STOP_SECONDS", 0.1)
    llm = LlmLike()
    release = threading.Event()
    llm.llm_engine.before_step = lambda: bool(release.wait(60)) and None
    with pytest.raises(ServerError, match="has not come back from a step"):
        ask(llm, requests(2), timeout=0.3)
    release.set()


def test_leaving_early_frees_the_engine() -> None:
    """Who stops listening leaves nothing under way, so that the LLM can be used again at once."""
    llm = LlmLike(lambda asked: Reply() if asked.prompt == "q0" else None)

    async def run() -> None:
        async with VllmOfflineBackend(llm) as backend:
            answers = backend.run(requests(4))
            assert (await anext(answers))[0] == 0
            await answers.aclose()
            assert not llm.llm_engine.pending

    asyncio.run(run())
    assert sorted(llm.llm_engine.aborted) == ["1", "2", "3"]
    for thread in threading.enumerate():
        if thread.name == "accuracy-gate-llm-steps":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "stopped-early"])
def test_a_cancelled_run_is_noted(cancelled: bool) -> None:
    """Whoever cancels a run has no time for the engine's polite end; whoever has heard enough does."""
    noted = threading.Event()
    llm = LlmLike(lambda asked: Reply() if asked.prompt == "q0" else None)

    async def run() -> None:
        backend = VllmOfflineBackend(llm, cancelled=noted)
        async with aclosing(backend.run(requests(3))) as answers:
            async for _ in answers:
                if not cancelled:
                    break

    async def within(seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run(), seconds)

    asyncio.run(within(0.3 if cancelled else 20.0))
    assert noted.is_set() is cancelled
    assert not llm.llm_engine.pending


def test_a_busy_llm_is_not_asked() -> None:
    """Somebody else's requests would be answered to us: the LLM is refused until it is free."""
    llm = LlmLike()
    llm.enqueue(["theirs"], SamplingParams(), use_tqdm=False)
    with pytest.raises(ServerError, match="1 requests of somebody else"):
        ask(llm, requests(1))


def test_an_old_vllm_is_refused() -> None:
    """A vLLM that cannot be asked request by request is a mistake to fix, named by what it lacks."""

    class Old(LlmLike):
        def __getattribute__(self, name: str) -> Any:
            if name == "enqueue_chat":
                raise AttributeError(name)
            return super().__getattribute__(name)

    ask(Old(), requests(1))
    with pytest.raises(ConfigError, match=r"has no LLM\.enqueue_chat"):
        ask(Old(), [GenerateRequest(prompt=HELLO, sampling=Sampling(max_tokens=8))])


def test_describe_says_what_answers() -> None:
    """Engine, model, type, device and context are on record; what is not told is "unknown"."""
    llm = LlmLike()
    llm.llm_engine.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))  # type: ignore[attr-defined]
    info = asyncio.run(VllmOfflineBackend(llm, model="embedded:like").describe())
    assert (info.engine, info.model) == ("vllm-offline", "embedded:like")
    assert info.details == {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 100,
        "quantization": None,
        "revision": "unknown",
    }


@pytest.mark.parametrize(("words", "fits"), [(92, True), (93, False)], ids=["exactly", "one-too-many"])
@pytest.mark.parametrize("chat", [False, True], ids=["prompt", "conversation"])
def test_the_context_is_checked_before_asking(words: int, fits: bool, chat: bool) -> None:
    """The longest prompt and `max_tokens` must fit into the engine's context, else nothing is asked."""
    text = " w" * words
    prompt = (ChatMessage(role="user", content=text),) if chat else text
    asked = [*requests(5), GenerateRequest(prompt=prompt, sampling=Sampling(max_tokens=8))]
    backend = VllmOfflineBackend(LlmLike())

    async def check() -> None:
        await backend.check_context(asked, await backend.describe())

    if fits:
        asyncio.run(check())
        return
    with pytest.raises(ServerError, match=re.escape("a prompt of 93 tokens and max_tokens 8 make 101, more than")):
        asyncio.run(check())


def metric(name: str, value: float, **labels: str) -> SimpleNamespace:
    return SimpleNamespace(name=f"vllm:{name}", labels=labels, value=value)


def positions(*values: int, engine: str = "0") -> SimpleNamespace:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    return SimpleNamespace(name=name, labels={"engine": engine}, values=list(values))


def test_counters_come_from_the_llm() -> None:
    """`get_metrics()` becomes the counters of the acceptance gate, summed over engines."""
    llm = LlmLike()
    llm.metrics = [
        *(metric("spec_decode_num_drafts", n, engine=str(n)) for n in (10, 30)),
        *(metric("spec_decode_num_accepted_tokens", n) for n in (5, 15)),
        positions(4, 1),
        positions(10, 5, engine="1"),
        metric("request_success", 7, finished_reason="stop"),
        metric("request_success", 2, finished_reason="length", engine="1"),
        metric("request_success", 1, finished_reason="length"),
        metric("kv_cache_usage_perc", 0.25),
        metric("kv_cache_usage_perc", 0.5),
        metric("num_requests_running", 3),
    ]
    counters = read_llm_counters(llm)
    found = acceptance(counters)
    assert found is not None
    assert (found.drafts, found.accepted_tokens, found.length) == (40, 20, 1.5)
    assert found.rate_by_position == (14 / 40, 6 / 40)
    assert (counters.by_finish_reason, counters.kv_cache_use) == ({"stop": 7, "length": 3}, 0.5)


def test_an_llm_without_statistics_has_no_counters() -> None:
    """vLLM's LLM keeps none by default: the message says how to switch them on."""
    llm = LlmLike()
    llm.llm_engine.log_stats = False
    with pytest.raises(CountersUnavailable, match="disable_log_stats=False"):
        read_llm_counters(llm)


NOT_OFFLINE = [
    pytest.param(
        {"server_args": "-dp 2"}, "data parallelism of 2 in one process is what vLLM's LLM refuses", id="data-parallel"
    ),
    pytest.param({"server_args": "--lora_modules a=b"}, "--lora-modules has no meaning", id="lora"),
    pytest.param(
        {"server_args": "--reasoning-parser=qwen3", "use_chat_completions": True},
        "reasoning and answer as one text",
        id="reasoning-in-chat",
    ),
    pytest.param({"kv_offload_check": True}, "kv_offload_check drops caches over HTTP", id="kv-offload"),
    pytest.param({"serve_command": "x {model} {port} {args}"}, "remove serve_command", id="serve-command"),
]


@pytest.mark.parametrize(("keys", "says"), NOT_OFFLINE)
def test_what_only_a_server_can_do_is_refused(keys: dict[str, Any], says: str) -> None:
    """A config whose answers would change without a server is a mistake, found without vLLM."""
    config = ModelConfig(model_name="m", accuracy_threshold=0.5, **keys)
    with pytest.raises(ConfigError, match=says):
        check_offline(config)


@pytest.mark.parametrize(
    "server_args",
    ["", "--max-model-len 4096 --tensor-parallel-size 2 -dp 1", "--reasoning-parser qwen3 --api-server-count 2"],
)
def test_other_configs_can_be_asked_offline(server_args: str) -> None:
    """Flags of the HTTP side are no obstacle, nor is a reasoning parser where no conversation is asked."""
    config = ModelConfig(model_name="m", accuracy_threshold=0.5, server_args=server_args)
    assert check_offline(config) is None


def test_an_llm_is_evaluated_as_it_is(tmp_path: Path) -> None:
    """The questions, prompts, scores, gates and record are the suite's; the LLM stays usable."""
    rows = read_jsonl(SHIPPED / "smoke.jsonl")
    answers = {row.question: row.answer for row in rows[:15]}

    def answer(asked: Asked) -> Reply:
        question = asked.prompt.rpartition("Question: ")[2].partition("\nAnswer:")[0]
        return Reply(text=f" {answers.get(question, '#### -1')}")

    llm = LlmLike(answer)
    llm.model_config.max_model_len = 4096
    passed = evaluate_offline(llm, task="smoke", accuracy_threshold=0.75, tolerance=0.0, record_dir=tmp_path)
    assert (passed.counts.asked, passed.counts.correct, passed.verdict) == (20, 15, Verdict.PASS)
    assert (passed.model_name, passed.server["engine"], passed.output_tokens) == ("models/like", "vllm-offline", 60)
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 20
    assert '"verdict": "pass"' in (tmp_path / "result.json").read_text()
    failed = evaluate_offline(llm, task="smoke", num_questions=20, accuracy_threshold=0.8, tolerance=0.0)
    assert failed.verdict is Verdict.REGRESSION
    assert "is below the floor 0.8" in failed.reason


def test_an_evaluation_in_a_running_loop() -> None:
    """A notebook has an event loop already; the function works there too."""

    async def notebook() -> int:
        llm = LlmLike()
        llm.model_config.max_model_len = 4096
        return evaluate_offline(llm, task="smoke", num_questions=2).counts.asked

    assert asyncio.run(notebook()) == 2


def test_an_outage_is_the_verdict_of_an_evaluation() -> None:
    """A dead engine is no exception but a result that says so, with what was measured before."""
    llm = LlmLike()
    llm.model_config.max_model_len = 4096
    llm.llm_engine.before_step = raising(RuntimeError("gone"))
    result = evaluate_offline(llm, task="smoke")
    assert result.verdict is Verdict.INFRASTRUCTURE
    assert "RuntimeError: gone" in result.reason
    assert result.counts.asked == 0


def test_every_question_refused_ends_an_evaluation() -> None:
    """When the first requests are all refused for one reason, the rest would be too."""
    llm = LlmLike()
    llm.model_config.max_model_len = 4096

    def refuse(prompt: Any) -> None:
        raise ValueError("no chat template")

    llm.refuse = refuse
    result = evaluate_offline(llm, task="smoke")
    assert (result.verdict, result.counts.asked) == (Verdict.INFRASTRUCTURE, 8)
    assert "the first 8 of 20 requests were all rejected: no chat template" in result.reason


def test_an_acceptance_length_needs_statistics() -> None:
    """A minimum that cannot be measured is an outage, never a pass."""
    llm = LlmLike()
    llm.model_config.max_model_len = 4096
    llm.llm_engine.log_stats = False
    result = evaluate_offline(llm, task="smoke", num_questions=1, min_acceptance_length=1.2)
    assert result.verdict is Verdict.INFRASTRUCTURE
    assert "disable_log_stats=False" in result.reason


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"server_args": "--x"}, "takes no server_args"),
        ({"max_token": 3}, "takes no max_token; known: .*max_tokens"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"task": "poetry"}, "task: "),
    ],
    ids=["of-a-server", "misspelt", "impossible", "unknown-task"],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], says: str) -> None:
    """A setting that would be ignored or cannot be is an error before anything is asked."""
    with pytest.raises(ConfigError, match=says):
        evaluate_offline(LlmLike(), **{"task": "smoke", **settings})
