"""How a transformers model writes: stops, reasons, seeds and sampling as servers have them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from tiny_models import ask, make_model, make_tokenizer, prompt, text

from harness.backends.base import (
    Generation,
    Request,
)

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install transformers torch")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model()


def test_a_reply_is_cut_at_its_stop_string(tokenizer: Any, llama: Any) -> None:
    """Text ends right before the first stop string, with the reason `stop`, and the row writes no further."""
    (free,) = ask(llama, tokenizer, [prompt(6, max_tokens=40)])
    assert isinstance(free, Generation)
    assert free.text
    stop = free.text[7:10]
    place = free.text.index(stop)
    (cut,) = ask(llama, tokenizer, [prompt(6, max_tokens=40, stop=(stop, "never there"))])
    assert isinstance(cut, Generation)
    assert (cut.text, cut.finish_reason) == (free.text[:place], "stop")
    assert cut.generated_tokens is not None
    assert free.generated_tokens is not None
    assert cut.generated_tokens < free.generated_tokens


def test_finish_reasons_tell_an_end_from_a_limit(tokenizer: Any) -> None:
    """A reply that ends by itself stops, with the end token counted and not shown; one at its limit has length."""
    import torch

    model = make_model()
    ids = tokenizer(text(6))["input_ids"]
    with torch.no_grad():
        second = int(model.generate(torch.tensor([ids]), max_new_tokens=2, do_sample=False, pad_token_id=1)[0, -1])
    (limited,) = ask(model, tokenizer, [prompt(6, max_tokens=2)])
    model.generation_config.eos_token_id = [second]
    (ended,) = ask(model, tokenizer, [prompt(6, max_tokens=9)])
    assert isinstance(limited, Generation)
    assert isinstance(ended, Generation)
    assert (limited.finish_reason, limited.generated_tokens) == ("length", 2)
    assert ended.finish_reason == "stop"
    assert ended.generated_tokens is not None
    assert ended.generated_tokens <= 2


def test_a_seed_is_the_requests_own(tokenizer: Any, llama: Any) -> None:
    """The same request and seed give the same text alone and in any company; another seed does not."""
    seeded = prompt(6, max_tokens=20, temperature=1.0, seed=7)
    company: list[Request] = [prompt(n, n, max_tokens=20, temperature=1.0, seed=n) for n in range(1, 9)]
    company += [prompt(4, temperature=0.7, top_p=0.9, top_k=5, seed=1), prompt(4), seeded]
    alone = ask(llama, tokenizer, [seeded])[0]
    among = ask(llama, tokenizer, company)[-1]
    other = ask(llama, tokenizer, [prompt(6, max_tokens=20, temperature=1.0, seed=8)])[0]
    assert isinstance(alone, Generation)
    assert isinstance(among, Generation)
    assert isinstance(other, Generation)
    assert alone.text == among.text != other.text


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=["top-k", "top-p", "cold"]
)
def test_sampling_narrowed_to_one_token_is_greedy(tokenizer: Any, llama: Any, narrow: dict[str, Any]) -> None:
    """top_k 1, a tiny top_p or temperature leave the likeliest token alone."""
    (sampled,) = ask(llama, tokenizer, [prompt(6, seed=3, **{"temperature": 1.0, **narrow})])
    (greedy,) = ask(llama, tokenizer, [prompt(6)])
    assert isinstance(sampled, Generation)
    assert isinstance(greedy, Generation)
    assert sampled.text == greedy.text


def test_draws_follow_the_models_chances(tokenizer: Any, llama: Any) -> None:
    """Two thousand first tokens are spread as the model's own probabilities say (chi-squared, 1 in 10,000)."""
    import torch
    from scipy.stats import chisquare

    asked = [prompt(4, max_tokens=1, temperature=3.0, top_k=5, seed=seed) for seed in range(2000)]
    answers = ask(llama, tokenizer, asked)
    with torch.no_grad():
        best = (llama(torch.tensor([tokenizer(text(4))["input_ids"]])).logits[0, -1] / 3.0).topk(5)
    expected = best.values.double().softmax(-1).tolist()
    names = [tokenizer.decode([int(token)], skip_special_tokens=True) for token in best.indices]
    shares: dict[str, float] = {}
    for name, share in zip(names, expected, strict=True):  # Two tokens may be one text.
        shares[name] = shares.get(name, 0.0) + share
    written = [answer.text for answer in answers if isinstance(answer, Generation)]
    counts = [written.count(name) for name in shares]
    assert (len(written), sum(counts)) == (2000, 2000)
    assert chisquare(counts, [2000 * share for share in shares.values()]).pvalue > 1e-4


def test_unset_settings_come_from_the_model(tokenizer: Any) -> None:
    """Temperature None is the generation config's, as with servers; 0 is greedy whatever that says."""
    model = make_model()
    (greedy,) = ask(model, tokenizer, [prompt(6)])
    model.generation_config.update(do_sample=True, temperature=0.9, top_k=1)
    (told,) = ask(model, tokenizer, [prompt(6, temperature=None, seed=1)])
    model.generation_config.update(do_sample=True, temperature=5.0, top_k=50)
    (wild,) = ask(model, tokenizer, [prompt(6, temperature=None, seed=1)])
    (cold,) = ask(model, tokenizer, [prompt(6, temperature=0.0, seed=1)])
    texts = [answer.text for answer in (greedy, told, wild, cold) if isinstance(answer, Generation)]
    assert texts[0] == texts[1] == texts[3] != texts[2]
