"""Secrets are masked, and what only looks a little like one is not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.redaction import MASK, SHORTEST, is_secret_name, redact, redact_argv, redact_env, secret_values

HF = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
AWS = "AKIA" + "IOSFODNN7EXAMPLE"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        pytest.param(f"using {HF}.", "using ***.", id="Hugging Face token"),
        pytest.param("sk-proj-0123456789abcdefXYZ_-9 sent", "*** sent", id="OpenAI key"),
        pytest.param("ghp_0123456789abcdefghij0123", "***", id="GitHub token"),
        pytest.param(f"id {AWS}, region", "id ***, region", id="AWS key id"),
        pytest.param("Authorization: Bearer abc.def-123", "Authorization: Bearer ***", id="bearer"),
        pytest.param("{'authorization': 'bearer abcdef123'}", "{'authorization': 'bearer ***'}", id="bearer in a dict"),
        pytest.param("authorization: Basic dXNlcjpwYXNzd29yZA==", "authorization: Basic ***", id="basic"),
        pytest.param("--api-key abc --port 80", "--api-key *** --port 80", id="option"),
        pytest.param("--api-key=abc --port 80", "--api-key=*** --port 80", id="option with ="),
        pytest.param("--hf-token 'a-b' x", "--hf-token '***' x", id="quoted option"),
        pytest.param("HF_TOKEN=abc PATH=/bin", "HF_TOKEN=*** PATH=/bin", id="token in an environment"),
        pytest.param("AWS_SECRET_ACCESS_KEY=a/b+c\nHOME=/", "AWS_SECRET_ACCESS_KEY=***\nHOME=/", id="key"),
        pytest.param("PGPASSWORD=x1", "PGPASSWORD=***", id="password"),
        pytest.param(
            "{'WANDB_API_KEY': 'a b', 'x': 1}", "{'WANDB_API_KEY': '***', 'x': 1}", id="dict of an environment"
        ),
        pytest.param('{"api_key": "a", "n": 2}', '{"api_key": "***", "n": 2}', id="JSON"),
        pytest.param(
            "args: {'api_key': ['abc'], 'port': 1}", "args: {'api_key': ['***'], 'port': 1}", id="vLLM's arguments"
        ),
        pytest.param("Namespace(api_key=abc, port=1)", "Namespace(api_key=***, port=1)", id="namespace"),
        pytest.param("http://me:pass@proxy:80/x", "http://***@proxy:80/x", id="password in a URL"),
        pytest.param("https://token@host/x", "https://***@host/x", id="token in a URL"),
        pytest.param("/f?X-Amz-Signature=ab12&x=1", "/f?X-Amz-Signature=***&x=1", id="signed URL"),
    ],
)
def test_what_looks_like_a_secret(text: str, masked: str) -> None:
    """A secret is masked by its looks alone, and the text around it stays."""
    assert redact(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "Avg generation throughput: 59.2 tokens/s, max_tokens=256, eos_token='</s>', --max-tokens 5",
        "hf_overrides={}, hf_config_path=None, task-specific-long-name-of-a-thing risk-assessment",
        "api_key=None, 'api_key': None, hf_token=null",
        "http://127.0.0.1:8000/v1/models?limit=a@b see https://docs.vllm.ai/en/latest/?x=y",
        "KV cache keys: 12, num_key_value_heads=8, key_cache=[1, 2]",
        "tokenizer=Qwen/Qwen3-0.6B, tokenizer_mode=auto",
        "basic usage; the bearer of news",
        "",
    ],
)
def test_what_is_no_secret(text: str) -> None:
    """The ordinary lines of a server's log stay as they are."""
    assert redact(text) == text


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        pytest.param("plain-value", "say plain-value twice: plain-value", id="as it is"),
        pytest.param("with/slash+plus", "https://x/?q=with%2Fslash%2Bplus", id="in a URL"),
        pytest.param('with"quote', '{"x": "with\\"quote"}', id="in JSON"),
        pytest.param("first-line\nsecond-line", "first-line\n  second-line", id="line by line"),
    ],
)
def test_known_secret(secret: str, text: str) -> None:
    """A known value is masked however it is written."""
    masked = redact(text, [secret])
    assert MASK in masked
    assert not any(part in masked for part in ("plain", "slash", "quote", "line"))


def test_longer_secret_first() -> None:
    """Of two known values, one within the other, nothing is left over."""
    assert redact("abcdefgh-and-more", ["abcdefgh", "abcdefgh-and-more"]) == MASK


def test_short_values_stay() -> None:
    """A value too short to be a secret is not hunted through the text."""
    assert redact("EMPTY is not 1", ["EMPTY", "", "1"]) == "EMPTY is not 1"


@settings(deadline=None)
@given(
    st.lists(st.text("abcXYZ0189", min_size=SHORTEST, max_size=12), min_size=1, max_size=3),
    st.lists(st.text(max_size=20), min_size=2, max_size=5),
)
def test_no_known_secret_survives(secrets: list[str], around: list[str]) -> None:
    """Whatever stands around them, known values are never in the result."""
    text = secrets[0].join(around) + "".join(secrets)
    masked = redact(text, secrets)
    assert not any(secret in masked for secret in secrets)


@settings(deadline=None)
@given(
    st.text(st.sampled_from("aB1-_=:'\"&?@/ \n") | st.characters(), max_size=60),
    st.sampled_from(["HF_TOKEN=", "--api-key ", "Bearer ", "://", "api_key: '", "?token=", ""]),
)
def test_masking_twice_changes_nothing(text: str, lead: str) -> None:
    """Text that has been masked is not masked further."""
    once = redact(lead + text)
    assert redact(once) == once


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("OPENAI_API_KEY", True),
        ("AWS_ACCESS_KEY_ID", True),
        ("PGPASSWORD", True),
        ("MY_SECRET_2", True),
        ("github_token", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("MAX_TOKENS", False),
        ("HF_TOKEN_PATH", False),
        ("SSH_KEY_FILE", False),
        ("KEYBOARD", False),
        ("PATH", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    """A variable's name tells whether it holds a secret."""
    assert is_secret_name(name) is secret


def test_values_of_an_environment() -> None:
    """Out of an environment come the values of secret names and the passwords in URLs, but nothing short."""
    env = {
        "HF_TOKEN": "token-value",
        "API_KEY": "EMPTY",
        "PATH": "/usr/local/bin",
        "https_proxy": "http://me:proxy-password@proxy:3128",
    }
    assert secret_values(env) == ("proxy-password", "token-value")


def test_environment_for_the_record() -> None:
    """An environment is shown with every secret masked, the short ones, and those that stand in other values, too."""
    env = {"HF_TOKEN": "token-value", "API_KEY": "EMPTY", "NO_KEY": "", "ARGS": "--x token-value", "HOME": "/root"}
    assert redact_env(env) == {"HF_TOKEN": MASK, "API_KEY": MASK, "NO_KEY": "", "ARGS": f"--x {MASK}", "HOME": "/root"}


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        pytest.param(
            ["vllm", "--api-key", "a", "b", "--port", "1"],
            ["vllm", "--api-key", MASK, MASK, "--port", "1"],
            id="values",
        ),
        pytest.param(["--api-key=a", "x"], [f"--api-key={MASK}", "x"], id="with ="),
        pytest.param(["--hf-token", "a", "--max-tokens", "5"], ["--hf-token", MASK, "--max-tokens", "5"], id="token"),
        pytest.param(["--header", "X: known-value"], ["--header", f"X: {MASK}"], id="known"),
        pytest.param(["--max-model-len", "4096", "m"], ["--max-model-len", "4096", "m"], id="none"),
    ],
)
def test_command_for_the_record(argv: list[str], shown: list[str]) -> None:
    """A command is shown with every value of a secret option masked."""
    assert redact_argv(argv, ["known-value"]) == shown
