"""Boundaries, prefixes, windows and cuts in tokens, against a model that is known by construction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.backends.base import LoglikelihoodRequest, Loglikelihoods, RollingLoglikelihood, RollingRequest
from harness.backends.tokens import (
    CLAMPED,
    DoesNotFit,
    Piece,
    ScoredPrompt,
    TokenScores,
    Vocabulary,
    answer,
    left_truncated,
    pieces,
    prompts,
)

BOS, EOS = 1, 2
LETTERS = {letter: 10 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz :\n.é")}
MERGES = {"th": 100, "he": 101, " a": 102, " b": 103, "the": 104, "ab": 105}


@dataclass(frozen=True)
class ToyTokenizer:
    """Takes the longest known string at each place; adds what it is told to add around prompts."""

    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        tokens: list[int] = []
        known = {"<s>": BOS, "</s>": EOS, **MERGES, **LETTERS}
        while text:
            longest = max((string for string in known if text.startswith(string)), key=len)
            tokens.append(known[longest])
            text = text[len(longest) :]
        return (*self.head, *tokens, *self.tail) if special else tuple(tokens)

    def encoded(self, wanted: Sequence[Piece]) -> dict[Piece, tuple[int, ...]]:
        return {piece: self.encode(piece.text, special=piece.special) for piece in wanted}


PLAIN = ToyTokenizer()
ADDS_BOS = ToyTokenizer(head=(BOS,))
ADDS_BOTH = ToyTokenizer(head=(BOS,), tail=(EOS,))
WITH_BOS = Vocabulary(bos=BOS, eos=EOS, max_model_len=64)


def bigram(before: int, token: int) -> float:
    """The model: a token's log probability after another, of which no two are alike."""
    return -((before * 131 + token) % 997 + 1) / 1000


def engine(prompt: ScoredPrompt) -> TokenScores:
    """Score as an engine does: each token given the one before it, the first token not at all."""
    everything = [None] + [bigram(a, b) for a, b in zip(prompt.tokens, prompt.tokens[1:], strict=False)]
    asked = everything[prompt.first :]
    return TokenScores(logprobs=tuple(value for value in asked if value is not None), greedy=len(asked) % 2 == 0)


def ask(
    request: LoglikelihoodRequest | RollingRequest, tokenizer: ToyTokenizer, vocabulary: Vocabulary = WITH_BOS
) -> tuple[ScoredPrompt, ...]:
    return prompts(request, tokenizer.encoded(pieces(request)), vocabulary)


def scored_by_hand(*tokens: int, first: int) -> float:
    return sum(bigram(tokens[i - 1], tokens[i]) for i in range(first, len(tokens)))


def ids(text: str) -> tuple[int, ...]:
    """Spell a text out, one token a letter."""
    return tuple(LETTERS[letter] for letter in text)


BOUNDARIES = [
    pytest.param(PLAIN, "x:", "cd", {}, ids("x:"), ids("cd"), id="clean"),
    pytest.param(ADDS_BOS, "x:", "cd", {}, (BOS, *ids("x:")), ids("cd"), id="bos-added"),
    pytest.param(ADDS_BOS, "<s>x:", "cd", {}, (BOS, *ids("x:")), ids("cd"), id="bos-in-the-text-and-added"),
    pytest.param(PLAIN, "<s>x:", "cd", {}, (BOS, *ids("x:")), ids("cd"), id="bos-in-the-text"),
    pytest.param(ADDS_BOTH, "x:", "cd", {}, (BOS, *ids("x:")), ids("cd"), id="eos-added-whole"),
    pytest.param(ADDS_BOTH, "x:", "cd", {"pairwise": True}, (BOS, *ids("x:")), ids("cd"), id="eos-added-apart"),
    pytest.param(ADDS_BOTH, "x</s>", "cd", {}, (BOS, *ids("x"), EOS), ids("cd"), id="eos-of-the-text-stays"),
    pytest.param(PLAIN, "x: ", "a", {}, ids("x:"), (102,), id="space-moves"),
    pytest.param(PLAIN, "x:  ", "a", {}, ids("x:"), (*ids(" "), 102), id="two-spaces-move"),
    pytest.param(PLAIN, "x: ", "c", {"move_spaces": False}, ids("x: "), ids("c"), id="space-stays"),
    pytest.param(PLAIN, "x: ", "a", {"move_spaces": False, "pairwise": True}, ids("x: "), ids("a"), id="apart"),
    pytest.param(PLAIN, "xt", "he", {"pairwise": True}, ids("xt"), (101,), id="apart-does-not-merge"),
    pytest.param(PLAIN, "xt", "he", {}, ids("x"), (104,), id="merged-token-is-scored"),
    pytest.param(ADDS_BOS, "t", "he", {}, (BOS,), (104,), id="merged-first-token-after-bos"),
    pytest.param(PLAIN, "t", "he", {}, (BOS,), (104,), id="merged-first-token-gets-the-prefix"),
    pytest.param(PLAIN, "", "cd", {}, (BOS,), ids("cd"), id="empty-context"),
    pytest.param(ADDS_BOS, "", "cd", {}, (BOS,), ids("cd"), id="empty-context-bos-added"),
    pytest.param(ADDS_BOS, "", "<s>cd", {}, (BOS,), ids("cd"), id="empty-context-bos-in-the-text"),
    pytest.param(ADDS_BOTH, "", "cd", {"pairwise": True}, (BOS,), ids("cd"), id="empty-context-apart"),
    pytest.param(PLAIN, "  ", "a", {}, (BOS,), (*ids(" "), 102), id="context-of-spaces"),
]


@pytest.mark.parametrize(("tokenizer", "context", "continuation", "options", "before", "scored"), BOUNDARIES)
def test_boundary_lies_where_the_rules_say(tokenizer, context, continuation, options, before, scored) -> None:
    """Context and continuation are split, joined and prefixed so that the sum is what is worked out by hand."""
    request = LoglikelihoodRequest(context=context, continuations=(continuation,), **options)
    (prompt,) = asked = ask(request, tokenizer)
    assert (prompt.tokens[: prompt.first], prompt.scored) == (before, scored)
    result = answer(request, asked, [engine(prompt)], latency=1.0)
    assert isinstance(result, Loglikelihoods)
    (score,) = result.scores
    assert score.logprob == pytest.approx(scored_by_hand(*before, *scored, first=len(before)), abs=1e-12)
    assert (score.tokens, score.bytes) == (len(scored), len(continuation.encode()))


def test_continuations_of_one_request_share_the_boundary() -> None:
    """Where one choice merges with the context, all are scored from the same token, and the answer says so."""
    request = LoglikelihoodRequest(context="xt", continuations=("he", "c"))
    merged, clean = asked = ask(request, PLAIN)
    assert (merged.tokens, merged.first) == ((*ids("x"), 104), 1)
    assert (clean.tokens, clean.first) == (ids("xtc"), 1)
    result = answer(request, asked, [engine(prompt) for prompt in asked], latency=1.0)
    assert isinstance(result, Loglikelihoods)
    assert len(result.fallbacks) == 1
    assert "merges" in result.fallbacks[0]
    clean_request = LoglikelihoodRequest(context="x:", continuations=("c", "d"))
    clean_asked = ask(clean_request, PLAIN)
    clean_result = answer(clean_request, clean_asked, [engine(prompt) for prompt in clean_asked], latency=1.0)
    assert isinstance(clean_result, Loglikelihoods)
    assert clean_result.fallbacks == ()


def test_without_bos_the_prefix_is_eos_and_without_both_an_error() -> None:
    """An empty context is BOS, else EOS; a tokenizer with neither is told what to do."""
    request = LoglikelihoodRequest(context="", continuations=("cd",))
    (prompt,) = ask(request, PLAIN, Vocabulary(bos=None, eos=EOS, max_model_len=64))
    assert prompt.tokens == (EOS, *ids("cd"))
    neither = Vocabulary(bos=None, eos=None, max_model_len=64)
    with pytest.raises(ValueError, match="bos_token"):
        ask(request, PLAIN, neither)
    with pytest.raises(ValueError, match="bos_token"):
        ask(RollingRequest(text="cd"), PLAIN, neither)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        pytest.param(LoglikelihoodRequest(context="x", continuations=("a", "")), "empty", id="empty-continuation"),
        pytest.param(LoglikelihoodRequest(context="x ", continuations=("",)), "empty", id="empty-after-a-space"),
        pytest.param(LoglikelihoodRequest(context="x", continuations=()), "empty", id="no-continuations"),
        pytest.param(LoglikelihoodRequest(context="", continuations=("<s>",)), "adds no token", id="only-bos"),
        pytest.param(LoglikelihoodRequest(context="x", continuations=("c" * 63,)), "do not fit", id="too-long"),
        pytest.param(RollingRequest(text=""), "no token", id="empty-text"),
        pytest.param(RollingRequest(text="<s>"), "no token", id="text-of-a-bos"),
        pytest.param(RollingRequest(text="cd", context=0), "at least 1", id="no-context"),
        pytest.param(RollingRequest(text="cd", max_window=4, context=4), "leaves nothing", id="context-fills-window"),
        pytest.param(RollingRequest(text="cd", context=63), "leaves nothing", id="context-fills-model"),
    ],
)
def test_what_cannot_be_scored_is_refused(request_, message) -> None:
    """Nothing that has no score gets one: the error says what is wrong."""
    with pytest.raises(ValueError, match=message):
        ask(request_, ADDS_BOS)


def test_only_lengths_are_a_matter_of_fit() -> None:
    """What no other model length would cure is told apart from what does not fit."""
    with pytest.raises(DoesNotFit):
        ask(LoglikelihoodRequest(context="x", continuations=("c" * 63,)), PLAIN)
    with pytest.raises(ValueError, match="empty") as caught:
        ask(LoglikelihoodRequest(context="x", continuations=("",)), PLAIN)
    assert not isinstance(caught.value, DoesNotFit)


@pytest.mark.parametrize("length", [61, 62, 63])
def test_continuation_fits_to_the_last_token(length) -> None:
    """One token before the continuation, the continuation and one generated token may fill the model exactly."""
    request = LoglikelihoodRequest(context="xyz", continuations=("c" * length,))
    if length + 2 > WITH_BOS.max_model_len:
        with pytest.raises(DoesNotFit):
            ask(request, ADDS_BOS)
        return
    (prompt,) = ask(request, ADDS_BOS)
    assert len(prompt.tokens) == 63
    assert prompt.scored == ids("c" * length)
    assert prompt.tokens[0] == BOS
    assert prompt.cut == 4 + length - 63


@given(st.text("abcxyz", min_size=1, max_size=90), st.text("cd", min_size=1, max_size=60), st.sampled_from([0, 1]))
def test_cut_contexts_keep_their_end_and_bos(context, continuation, adds) -> None:
    """A context that is too long loses tokens after its BOS, all counted, and never one of the continuation."""
    tokenizer = (PLAIN, ADDS_BOS)[adds]
    request = LoglikelihoodRequest(context=context, continuations=(continuation,))
    (prompt,) = asked = ask(request, tokenizer)
    full = tokenizer.encode(context + continuation, special=True)
    assert len(prompt.tokens) == min(len(full), 63)
    assert prompt.cut == len(full) - len(prompt.tokens)
    assert prompt.scored == tokenizer.encode(continuation, special=False)
    assert prompt.first >= 1
    assert prompt.tokens.count(BOS) == adds
    assert prompt.tokens[adds:] == full[len(full) - len(prompt.tokens) + adds :]
    result = answer(request, asked, [engine(prompt)], latency=1.0)
    assert isinstance(result, Loglikelihoods)
    assert result.context_tokens_cut == prompt.cut


@given(
    st.text("abcdthe é\n.", min_size=1, max_size=150),
    st.sampled_from([PLAIN, ADDS_BOS, ADDS_BOTH]),
    st.integers(2, 80),
    st.integers(1, 20),
    st.booleans(),
)
def test_windows_score_every_token_exactly_once(text, tokenizer, max_window, context, spelt) -> None:
    """Joined, the scored tokens are the text; windows keep to their length, see enough before, and hold BOS once."""
    request = RollingRequest(text="<s>" * spelt + text, max_window=max_window, context=context)
    window = min(max_window, 63)
    if context >= window:
        with pytest.raises(DoesNotFit):
            ask(request, tokenizer)
        return
    asked = ask(request, tokenizer)
    tokens = tokenizer.encode(text, special=False)
    assert tuple(token for prompt in asked for token in prompt.scored) == tokens
    assert all(len(prompt.tokens) <= window for prompt in asked)
    assert all(len(prompt.tokens) == window for prompt in asked[:-1])
    assert [prompt.first for prompt in asked] == [1] + [context] * (len(asked) - 1)
    assert [prompt.tokens.count(BOS) for prompt in asked] == [1] + [0] * (len(asked) - 1)
    done = len(asked[0].scored)
    for prompt in asked[1:]:
        assert prompt.tokens[:context] == tokens[done - context : done]
        done += len(prompt.scored)
    # A bigram model sees all it needs in any window, so however it is cut the sum is that of the whole text.
    result = answer(request, asked, [engine(prompt) for prompt in asked], latency=1.0)
    assert isinstance(result, RollingLoglikelihood)
    assert result.logprob == pytest.approx(scored_by_hand(BOS, *tokens, first=1), abs=1e-9)
    assert (result.tokens, result.windows) == (len(tokens), len(asked))
    assert result.bytes == len(request.text.encode())


def test_text_of_one_window_is_not_cut() -> None:
    """A text that fits with its prefix and one generated token is one prompt; one token more makes two."""
    (prompt,) = ask(RollingRequest(text="c" * 62), PLAIN)
    assert prompt == ScoredPrompt(tokens=(BOS, *ids("c" * 62)), first=1)
    first, second = ask(RollingRequest(text="c" * 63), PLAIN)
    assert len(first.tokens) == 63
    assert second == ScoredPrompt(tokens=ids("cc"), first=1)


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        (CLAMPED, None),
        (-10000.0, None),
        (2e-6, None),
        (1e-7, 0.0),
        (0.0, 0.0),
        (-9998.0, -9998.0),
    ],
)
@pytest.mark.parametrize("rolling", [False, True])
def test_values_that_are_no_log_probabilities_are_refused(value, accepted, rolling) -> None:
    """NaN, infinities, the clamp and positive values never enter a sum; rounding about zero does, as zero."""
    request: LoglikelihoodRequest | RollingRequest = LoglikelihoodRequest(context="x", continuations=("cdc",))
    if rolling:
        request = RollingRequest(text="cdc")
    asked = ask(request, PLAIN)
    scores = [TokenScores(logprobs=(-0.5, value, -0.25), greedy=True)]
    if accepted is None:
        with pytest.raises(ValueError, match=rf"token 2 of the prompt \(id {LETTERS['d']}\)"):
            answer(request, asked, scores, latency=1.0)
        return
    result = answer(request, asked, scores, latency=1.0, attempts=2)
    logprob = result.logprob if isinstance(result, RollingLoglikelihood) else result.scores[0].logprob
    assert logprob == -0.75 + accepted
    assert (result.attempts, result.latency) == (2, 1.0)


@pytest.mark.parametrize("values", [(), (-1.0,), (-1.0, -1.0, -1.0)])
def test_wrong_number_of_values_is_refused(values) -> None:
    """A value too few or too many means that the values belong to other tokens."""
    request = LoglikelihoodRequest(context="x", continuations=("cd",))
    with pytest.raises(ValueError, match="for 2 scored tokens"):
        answer(request, ask(request, PLAIN), [TokenScores(logprobs=values, greedy=True)], latency=1.0)
    with pytest.raises(ValueError, match="where 1 were asked"):
        answer(request, ask(request, PLAIN), [], latency=1.0)


def test_sums_do_not_depend_on_the_order_of_tiny_and_huge_values() -> None:
    """A long text's sum is exact to the last bit: tenths add up to what they are."""
    request = RollingRequest(text="c" * 60)
    result = answer(request, ask(request, PLAIN), [TokenScores(logprobs=(-0.1,) * 60, greedy=True)], latency=1.0)
    assert isinstance(result, RollingLoglikelihood)
    assert result.logprob == -6.0


def test_greedy_belongs_to_its_continuation() -> None:
    """Each continuation carries its own prompt's greedy flag."""
    request = LoglikelihoodRequest(context="x", continuations=("c", "d"))
    scores = [TokenScores(logprobs=(-1.0,), greedy=False), TokenScores(logprobs=(-2.0,), greedy=True)]
    result = answer(request, ask(request, PLAIN), scores, latency=1.0)
    assert isinstance(result, Loglikelihoods)
    assert [(score.logprob, score.greedy) for score in result.scores] == [(-1.0, False), (-2.0, True)]


@given(st.lists(st.integers(10, 20), max_size=40), st.integers(1, 30), st.integers(1, 40), st.booleans())
def test_left_truncation_leaves_room_for_the_reply(body, max_new_tokens, max_model_len, adds) -> None:
    """Prompt and reply fit, what is kept is the end, BOS stays, and what went is counted."""
    tokens = [BOS] * adds + body
    if max_new_tokens >= max_model_len:
        with pytest.raises(DoesNotFit, match="lower max_tokens"):
            left_truncated(tokens, max_new_tokens=max_new_tokens, max_model_len=max_model_len, bos=BOS)
        return
    kept, cut = left_truncated(tokens, max_new_tokens=max_new_tokens, max_model_len=max_model_len, bos=BOS)
    assert len(kept) + cut == len(tokens)
    assert len(kept) == min(len(tokens), max_model_len - max_new_tokens)
    assert kept.count(BOS) == adds
    assert kept[adds:] == tuple(body[len(body) - len(kept) + adds :])
