"""Tokenizers of transformers, as folders on disk, behind the scoring rules."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.backends.base import LoglikelihoodRequest, RollingRequest
from harness.backends.hf_tokenizer import HfTokenizer, context_length
from harness.backends.tokens import Piece, Vocabulary, pieces, prompts
from harness.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Write a byte-level tokenizer that puts the given template around prompts, as a model's folder."""

    def write(template: str = "$A", **tokens: Any) -> Path:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "th", "the"])}
        built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
        built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.decoder = tokenizers.decoders.ByteLevel()
        built.add_special_tokens(["<s>", "</s>"])
        built.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        named = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 8, **tokens}
        transformers.PreTrainedTokenizerFast(tokenizer_object=built, **named).save_pretrained(tmp_path)
        return tmp_path

    return write


def load(source: Path) -> HfTokenizer:
    return HfTokenizer.load(str(source), trust_remote_code=False)


def spell(text: str) -> tuple[int, ...]:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return tuple(2 + alphabet.index(letter) for letter in text.replace(" ", "Ġ"))


@pytest.mark.parametrize(
    ("template", "head", "tail"),
    [("$A", (), ()), ("<s> $A", (0,), ()), ("<s> $A </s>", (0,), (1,))],
    ids=["nothing", "bos", "bos-and-eos"],
)
def test_special_tokens_come_only_where_asked(folder: Folder, template, head, tail) -> None:
    """A piece is encoded with what the tokenizer adds to prompts, or with nothing but its text."""
    tokenizer = load(folder(template))
    bare, prompt = Piece(text="ab c", special=False), Piece(text="ab c", special=True)
    assert tokenizer.encoded([bare, prompt, bare]) == {
        bare: spell("ab c"),
        prompt: (*head, *spell("ab c"), *tail),
    }
    assert tokenizer.encoded([]) == {}


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>"])
def test_rules_hold_with_a_real_tokenizer(folder: Folder, template) -> None:
    """BOS stands once, EOS of the tokenizer nowhere, and merges across the boundary are found."""
    tokenizer = load(folder(template))
    vocabulary = tokenizer.vocabulary(64)
    bos = (0,) if "<s>" in template else ()
    asked = {
        (): LoglikelihoodRequest(context="x ", continuations=("y",)),
        ("spelt",): LoglikelihoodRequest(context="<s>x ", continuations=("y",)),
    }
    for spelt, request in asked.items():
        (prompt,) = prompts(request, tokenizer.encoded(pieces(request)), vocabulary)
        assert prompt.tokens == ((0,) if spelt else bos) + spell("x y")
        assert prompt.scored == spell(" y")
    merged = LoglikelihoodRequest(context="xt", continuations=("he",))
    (prompt,) = prompts(merged, tokenizer.encoded(pieces(merged)), vocabulary)
    assert len(prompt.scored) == 1
    assert prompt.fallback is not None
    rolling = RollingRequest(text="x y é")
    (window,) = prompts(rolling, tokenizer.encoded(pieces(rolling)), vocabulary)
    assert (window.tokens[0], len(window.scored)) == (0, len("x y é".encode()))


def test_long_texts_are_whole_and_draw_no_warning(folder: Folder, caplog, capfd) -> None:
    """A text longer than the tokenizer's longest is neither cut nor complained about."""
    tokenizer = load(folder("<s> $A"))
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        (tokens,) = tokenizer.encoded([Piece(text="a" * 100, special=True)]).values()
    finally:
        logger.removeHandler(caplog.handler)
    assert len(tokens) == 101
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_vocabulary_names_bos_and_eos_or_none(folder: Folder) -> None:
    """BOS and EOS are the tokenizer's; what it does not have is None, quietly."""
    assert load(folder()).vocabulary(64) == Vocabulary(bos=0, eos=1, max_model_len=64)
    without = load(folder(bos_token=None)).vocabulary(32)
    assert without == Vocabulary(bos=None, eos=1, max_model_len=32)
    assert without.prefix == 1


def test_threads_may_share_a_tokenizer(folder: Folder) -> None:
    """Pieces encoded from many threads at once are each their own."""
    tokenizer = load(folder("<s> $A"))
    wanted = [Piece(text=f"{number} the", special=number % 2 == 0) for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda piece: tokenizer.encoded([piece])[piece], wanted))
    assert dict(zip(wanted, found, strict=True)) == tokenizer.encoded(wanted)
    assert len({*found}) == 200


def test_tokenizer_without_the_usual_options_is_used_as_it_is() -> None:
    """An engine's own tokenizer that knows only `add_special_tokens` serves as well."""

    class Bare:
        bos_token_id = 7

        def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
            return {"input_ids": [[7] * add_special_tokens + [ord(letter) for letter in text] for text in texts]}

    tokenizer = HfTokenizer(Bare())
    piece = Piece(text="ab", special=True)
    assert tokenizer.encoded([piece]) == {piece: (7, 97, 98)}
    assert tokenizer.vocabulary(10) == Vocabulary(bos=7, eos=None, max_model_len=10)


def test_missing_files_name_the_source_and_the_remedy(tmp_path: Path) -> None:
    """A folder without a tokenizer is the config's fault, and the message says what to do."""
    source = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"tokenizer .*nothing.*name a folder"):
        HfTokenizer.load(source, trust_remote_code=False, local_only=True)
    assert context_length(source, trust_remote_code=False) is None


def test_missing_transformers_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers the message is the command that installs it."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        HfTokenizer.load("somewhere", trust_remote_code=False)


def test_model_length_comes_from_its_configuration(tmp_path: Path) -> None:
    """A folder that holds a model's configuration tells the longest sequence."""
    transformers.LlamaConfig(max_position_embeddings=321).save_pretrained(tmp_path)
    assert context_length(str(tmp_path), trust_remote_code=False) == 321
