"""Asking a transformers model in memory: true scores, whole batches of anything, and a model left as it was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from tiny_models import Memory, ask, cuda_fault, make_model, make_tokenizer, prompt, text

from harness.backends.base import (
    ChatMessage,
    Failure,
    GenerateRequest,
    Generation,
    LoglikelihoodRequest,
    Loglikelihoods,
    Request,
    RequestKind,
    RollingLoglikelihood,
    RollingRequest,
    Sampling,
)
from harness.backends.transformers import TransformersBackend
from harness.errors import ConfigError, CountersUnavailable, ServerDied, ServerError

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install transformers torch")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model()


def by_hand(model: Any, tokens: Sequence[int], first: int) -> tuple[float, bool]:
    """Score tokens from `first` on with one plain forward pass over them alone."""
    import torch

    with torch.no_grad():
        logs = model(torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1)
    wanted = range(first, len(tokens))
    total = sum(float(logs[place - 1, tokens[place]]) for place in wanted)
    return total, all(int(logs[place - 1].argmax()) == tokens[place] for place in wanted)


def generated_alone(model: Any, tokenizer: Any, given: str, max_tokens: int) -> str:
    import torch

    ids = torch.tensor([tokenizer(given)["input_ids"]])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=1
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_scores_are_those_of_a_plain_forward_pass(tokenizer: Any, kind: str) -> None:
    """Whatever shares its batch and its padding, a continuation's score is that of its own forward pass to 1e-5."""
    model = make_model(kind)
    asked = [
        LoglikelihoodRequest(context=text(n, n), continuations=(" " + text(1, n), " " + text(4, n + 3)))
        for n in (1, 3, 9, 27, 40)
    ]
    answers = ask(model, tokenizer, asked)
    for request, answer in zip(asked, answers, strict=True):
        assert isinstance(answer, Loglikelihoods)
        for continuation, score in zip(request.continuations, answer.scores, strict=True):
            before = tokenizer(request.context)["input_ids"]
            whole = tokenizer(request.context + continuation)["input_ids"]
            total, greedy = by_hand(model, whole, len(before))
            assert score.logprob == pytest.approx(total, abs=1e-5 * score.tokens + 1e-5)
            assert score.greedy == greedy
            assert (score.tokens, score.bytes) == (len(whole) - len(before), len(continuation.encode()))


def test_greedy_is_told(tokenizer: Any, llama: Any) -> None:
    """What the model would write itself is greedy, and a continuation of it with another end is not."""
    import torch

    for words in range(1, 40):
        with torch.no_grad():
            likeliest = int(llama(torch.tensor([tokenizer(text(words))["input_ids"]])).logits[0, -1].argmax())
        reply = tokenizer.decode([likeliest])
        if likeliest > 1 and tokenizer(reply)["input_ids"] == [likeliest]:
            break
    else:
        pytest.fail("no reply of this model is one token of text")
    request = LoglikelihoodRequest(context=text(words), continuations=(reply, "~"), pairwise=True, move_spaces=False)
    (answer,) = ask(llama, tokenizer, [request])
    assert isinstance(answer, Loglikelihoods)
    assert [score.greedy for score in answer.scores] == [True, False]


def test_a_whole_text_is_scored_over_its_windows(tokenizer: Any, llama: Any) -> None:
    """A text longer than the model is scored once a token: with disjoint windows, the sum of each window's own."""
    long = text(400)
    tokens = tokenizer(long, add_special_tokens=False)["input_ids"]
    (answer,) = ask(llama, tokenizer, [RollingRequest(text=long)], max_model_len=64)
    assert isinstance(answer, RollingLoglikelihood)
    assert answer.tokens == len(tokens)
    assert answer.windows > 1
    short = ask(llama, tokenizer, [RollingRequest(text=text(9))])[0]
    assert isinstance(short, RollingLoglikelihood)
    nine = tokenizer(text(9), add_special_tokens=False)["input_ids"]
    assert short.logprob == pytest.approx(by_hand(llama, [0, *nine], 1)[0], abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_greedy_text_is_that_of_generate_alone(tokenizer: Any, kind: str) -> None:
    """Prompts of any lengths in one batch, padded on the left, each get what `generate` gives them alone."""
    model = make_model(kind)
    asked = [prompt(n, n) for n in (1, 2, 5, 11, 30, 3, 17)]
    answers = ask(model, tokenizer, asked)
    for request, answer in zip(asked, answers, strict=True):
        assert isinstance(answer, Generation)
        assert isinstance(request.prompt, str)
        assert answer.text == generated_alone(model, tokenizer, request.prompt, 12)
        assert answer.prompt_tokens == len(tokenizer(request.prompt)["input_ids"])


def test_a_thousand_mixed_requests_come_back_in_order(tokenizer: Any, llama: Any) -> None:
    """Of a thousand requests of all kinds, lengths and settings, each answer belongs to its own request."""
    makers: list[Callable[[int], Request]] = [
        lambda i: prompt(1 + i % 13, i, max_tokens=1 + i % 3),
        lambda i: LoglikelihoodRequest(context=text(1 + i % 7, i), continuations=(" a" * (1 + i % 4),)),
        lambda i: RollingRequest(text=text(1 + i % 19, i)),
    ]
    asked = [makers[i % 3](i) for i in range(1000)]
    for request, answer in zip(asked, ask(llama, tokenizer, asked), strict=True):
        match request, answer:
            case GenerateRequest(prompt=str(given)), Generation():
                assert answer.prompt_tokens == len(tokenizer(given)["input_ids"])
                assert answer.generated_tokens is not None
                assert answer.generated_tokens <= request.sampling.max_tokens
            case LoglikelihoodRequest(), Loglikelihoods():
                assert [s.bytes for s in answer.scores] == [len(c) for c in request.continuations]
            case RollingRequest(), RollingLoglikelihood():
                assert answer.bytes == len(request.text)
            case _:
                pytest.fail(f"{request} was answered by {answer}")


def test_another_fault_ends_the_backend(tokenizer: Any) -> None:
    """What is not want of memory is not tried again: the backend is gone, and says of what."""
    model = make_model()
    Memory(model, 10, lambda: RuntimeError("device-side assert triggered"))
    with pytest.raises(ServerDied, match="device-side assert triggered"):
        ask(model, tokenizer, [prompt(20)])


def test_chat_goes_through_the_template(tokenizer: Any, llama: Any) -> None:
    """A conversation is asked as the template writes it, with the request's arguments, and only once."""
    turns = (ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="the fox"))
    sampling = Sampling(max_tokens=8)
    chat = GenerateRequest(prompt=turns, sampling=sampling, chat_template_kwargs={"loud": True})
    written = "[system] be brief\n[user] the fox\nLOUD [assistant] "
    by_template, by_text = ask(llama, tokenizer, [chat, GenerateRequest(prompt=written, sampling=sampling)])
    assert isinstance(by_template, Generation)
    assert isinstance(by_text, Generation)
    assert (by_template.text, by_template.prompt_tokens) == (by_text.text, by_text.prompt_tokens)


def test_a_conversation_the_template_refuses_is_a_failure(llama: Any) -> None:
    """What the template raises is that request's failure, with its words."""
    refusing = make_tokenizer()
    refusing.chat_template = "{{ raise_exception('roles must alternate') }}"
    asked = [
        GenerateRequest(prompt=(ChatMessage(role="user", content="x"),), sampling=Sampling(max_tokens=2)),
        prompt(2),
    ]
    refused, answered = ask(llama, refusing, asked)
    assert isinstance(refused, Failure)
    assert refused.kind == "rejected"
    assert "roles must alternate" in refused.detail
    assert isinstance(answered, Generation)


def test_a_prompt_that_is_too_long_is_cut_or_refused(tokenizer: Any, llama: Any) -> None:
    """With `truncate_prompt` the left is cut and counted; without, the request fails and names the remedy."""
    long, room = text(60), Sampling(max_tokens=8)
    cut, refused = ask(
        llama,
        tokenizer,
        [
            GenerateRequest(prompt=long, sampling=room, truncate_prompt=True),
            GenerateRequest(prompt=long, sampling=room),
        ],
        max_model_len=32,
    )
    total = len(tokenizer(long)["input_ids"])
    assert isinstance(cut, Generation)
    assert (cut.prompt_tokens, cut.prompt_tokens_cut) == (24, total - 24)
    assert isinstance(refused, Failure)
    assert "raise max_model_len" in refused.detail


def test_the_event_loop_lives_while_the_model_works(tokenizer: Any, llama: Any) -> None:
    """Other tasks run while a batch is under way, and answers come before the last batch is done."""

    async def run() -> bool:
        ticked = threading.Event()
        asyncio.get_running_loop().call_soon(ticked.set)
        seen: list[bool] = []
        hook = llama.register_forward_pre_hook(lambda *_: seen.append(ticked.wait(20)))
        try:
            async with TransformersBackend.from_model(llama, tokenizer, batch_size=1) as backend:
                _ = [answer async for answer in backend.run([prompt(3), prompt(2)])]
        finally:
            hook.remove()
        return all(seen) and bool(seen)

    assert asyncio.run(run())


def test_closing_stops_after_the_batch_under_way(tokenizer: Any) -> None:
    """Once nobody wants more answers the model is asked nothing further, and no thread is left in it."""
    model = make_model()
    memory = Memory(model, 10**9, cuda_fault)

    async def run() -> None:
        async with TransformersBackend.from_model(model, tokenizer, batch_size=1) as backend:
            answers = backend.run([RollingRequest(text=text(n + 1)) for n in range(200)])
            await anext(answers)
            await answers.aclose()

    asyncio.run(run())
    assert len(memory.shapes) < 200
    assert not [thread for thread in threading.enumerate() if thread.name == "accuracy-gate-batches"]


def test_describe_and_checks(tokenizer: Any, llama: Any) -> None:
    """The record says engine, versions, precision and device; the context is checked; counters are refused."""
    import torch
    import transformers

    async def run() -> None:
        backend = TransformersBackend.from_model(llama, tokenizer, name="tiny")
        info = await backend.describe()
        assert (info.engine, info.version, info.model) == ("transformers", transformers.__version__, "tiny")
        expected = {"torch": torch.__version__, "dtype": "float32", "device": "cpu", "max_model_len": 256}
        assert {key: info.details[key] for key in expected} == expected
        assert backend.kinds == frozenset(RequestKind)
        await backend.check_context([prompt(5), RollingRequest(text="a")], info)
        with pytest.raises(ServerError, match="raise max_model_len"):
            await backend.check_context([prompt(5, max_tokens=255)], info)
        with pytest.raises(CountersUnavailable, match="keeps no counters"):
            await backend.counters()

    asyncio.run(run())


def test_an_encoder_decoder_is_refused(tokenizer: Any) -> None:
    """A model with an encoder is a mistake, said at once."""
    import transformers

    config = transformers.T5Config(vocab_size=400, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    with pytest.raises(ConfigError, match="has an encoder"):
        TransformersBackend.from_model(transformers.T5ForConditionalGeneration(config), tokenizer)


def test_a_model_in_training_is_left_as_it_was(tokenizer: Any) -> None:
    """Modes module by module, gradients, caches and torch's random numbers are the training loop's own again."""
    import torch

    model = make_model()
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    ask(model, tokenizer, [prompt(4, temperature=1.0), RollingRequest(text=text(4))])
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_dropout_is_off_while_asked(tokenizer: Any) -> None:
    """A model in training mode is asked in evaluation mode: its scores are those without dropout."""
    model = make_model("gpt2")
    asked = [RollingRequest(text=text(8))]
    expected = ask(model, tokenizer, asked)[0]
    model.train()
    answer = ask(model, tokenizer, asked)[0]
    assert isinstance(expected, RollingLoglikelihood)
    assert isinstance(answer, RollingLoglikelihood)
    assert answer.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_a_compiled_model_answers_the_same(tokenizer: Any) -> None:
    """Compiled, scores and texts stay, every shape is compiled for, and model and limits are as before afterwards."""
    import torch

    asked: list[Request] = [RollingRequest(text=text(n)) for n in (3, 20, 60, 90)]
    asked += [prompt(n, max_tokens=4) for n in (2, 9, 25)]
    plain = ask(make_model(), tokenizer, asked, batch_size=1)
    model = make_model()
    limit = torch._dynamo.config.recompile_limit
    built: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        built.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 1
    try:
        compiled = ask(model, tokenizer, asked, batch_size=1, compile=backend)
        assert torch._dynamo.config.recompile_limit == 1
    finally:
        torch._dynamo.config.recompile_limit = limit
        torch._dynamo.reset()
    assert len(built) > 1
    assert model._compiled_call_impl is None
    for one, other in zip(plain, compiled, strict=True):
        if isinstance(one, Generation) and isinstance(other, Generation):
            assert one.text == other.text
        else:
            assert isinstance(one, RollingLoglikelihood)
            assert isinstance(other, RollingLoglikelihood)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
