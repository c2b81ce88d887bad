"""How batches of a transformers model are found: halved where memory runs out, doubled where rows get shorter."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from tiny_models import Memory, ask, cpu_fault, cuda_fault, make_model, make_tokenizer, prompt, text

from harness.backends.base import (
    Failure,
    Generation,
    LoglikelihoodRequest,
    Request,
    RollingLoglikelihood,
    RollingRequest,
)
from harness.backends.batch_search import BatchQueue

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install transformers torch")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


class Length:
    def __init__(self, length: int) -> None:
        self.length = length


def test_the_queue_takes_the_longest_first_and_doubles_as_rows_halve() -> None:
    """Rows come longest first, and twice as many at once when they are half as long."""
    queue = BatchQueue([Length(n) for n in [10] * 8 + [100] * 4 + [50] * 8], start=2, limit=8)
    taken = []
    while len(queue):
        taken.append([row.length for row in queue.take()])
    assert taken == [[100, 100], [100, 100], [50] * 4, [50] * 4, [10] * 8]


def test_a_batch_put_back_is_tried_in_halves() -> None:
    """A batch that did not fit keeps its order and comes back in halves, down to one row that never will fit."""
    queue = BatchQueue([Length(n) for n in (4, 3, 2, 2)], start=4, limit=4)
    batch = queue.take()
    assert queue.put_back(batch)
    half = queue.take()
    assert [row.length for row in half] == [4, 3]
    assert queue.put_back(half)
    alone = queue.take()
    assert [row.length for row in alone] == [4]
    assert not queue.put_back(alone)


@pytest.mark.parametrize("fault", [cuda_fault, cpu_fault], ids=["cuda", "cpu"])
def test_batches_are_halved_until_they_fit(tokenizer: Any, fault: Callable[[], BaseException]) -> None:
    """Out of memory halves the batch, shorter rows double it again, and no answer changes."""
    asked: list[Request] = [prompt(1 + n % 60, n, max_tokens=2) for n in range(60)]
    asked += [RollingRequest(text=text(1 + n % 60, n)) for n in range(60)]
    expected = ask(make_model(), tokenizer, asked)
    model = make_model()
    memory = Memory(model, 400, fault)
    answers = ask(model, tokenizer, asked)
    for one, other in zip(answers, expected, strict=True):
        if isinstance(one, RollingLoglikelihood) and isinstance(other, RollingLoglikelihood):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        else:
            assert isinstance(one, Generation)
            assert isinstance(other, Generation)
            assert one.text == other.text
    refused = [shape for shape in memory.shapes if shape[0] * shape[1] > 400]
    fit = [shape for shape in memory.shapes if shape[0] * shape[1] <= 400]
    assert refused
    assert max(width for _, width in fit) * 2 > max(width for _, width in refused)
    assert max(rows for rows, _ in fit) > min(rows for rows, _ in fit if rows > 1)


def test_a_row_that_does_not_fit_alone_fails_alone(tokenizer: Any) -> None:
    """A request too large for the memory is a Failure that says so; the others are answered."""
    model = make_model()
    Memory(model, 100, cuda_fault)
    asked: list[Request] = [
        RollingRequest(text=text(60)),
        RollingRequest(text=text(5)),
        LoglikelihoodRequest(context="the", continuations=(" " + text(60), " fox")),
        prompt(60, max_tokens=2),
        prompt(3),
    ]
    first, second, third, fourth, fifth = ask(model, tokenizer, asked)
    for failed in (first, third, fourth):
        assert isinstance(failed, Failure)
        assert "do not fit into the memory of cpu" in failed.detail
    assert isinstance(second, RollingLoglikelihood)
    assert isinstance(fifth, Generation)
