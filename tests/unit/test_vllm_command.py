"""`vllm serve`: the command line, the environment and the names that follow from a config."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.servers.launching import kept_key
from harness.servers.vllm import check_command, command, environment, find_vllm, served_model


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(model_name=keys.pop("model_name", "org/M"), accuracy_threshold=0.5, **keys)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A `vllm` command on PATH, and none beside this Python."""
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    return str(program)


def test_the_arguments_are_the_shells_then_the_standard_flags(vllm: str) -> None:
    """server_args is split as a shell would, JSON in single quotes whole; vLLM's two standard flags follow."""
    args = """--max-model-len 4096 --speculative-config '{"method": "ngram"}'"""
    assert command(config(server_args=args), "org/M", 8001) == (
        *(vllm, "serve", "org/M", *shlex.split(args)),
        *("--trust-remote-code", "--disable-uvicorn-access-log", "--host", "127.0.0.1", "--port", "8001"),
    )


def test_remote_code_can_be_refused(vllm: str) -> None:
    """`trust_remote_code: false` leaves out that flag alone."""
    words = command(config(trust_remote_code=False), "org/M", 8001)
    assert "--trust-remote-code" not in words
    assert "--disable-uvicorn-access-log" in words


SERVED = {
    "": "org/M",
    "--served-model-name short": "short",
    "--served-model-name=short other": "short",
    "--served_model_name short": "short",
    "--max-model-len 1 --served-model-name": "org/M",
}


@pytest.mark.parametrize(("args", "name"), SERVED.items(), ids=SERVED)
def test_requests_name_the_model_as_it_is_served(args: str, name: str) -> None:
    """The first served name, in any spelling of the flag, is what requests must say."""
    assert served_model(config(server_args=args)) == name


def test_an_embedded_model_is_served_under_its_configs_name(vllm: str) -> None:
    """The folder's path stays out of requests and records, unless the config names the model itself."""
    words = command(config(model_name="embedded:x"), "/cache/x", 8001)
    assert words[words.index("--served-model-name") + 1] == "embedded:x"
    named = command(config(model_name="embedded:x", server_args="--served-model-name=y"), "/cache/x", 8001)
    assert "--served-model-name" not in named


def test_a_template_starts_any_build() -> None:
    """Placeholders are filled word by word, other braces are left alone, and {args} becomes the arguments."""
    template = "/opt/venv/bin/vllm serve {model} --host {host} --port={port} --x '{\"a\": 1}' {args}"
    words = command(config(server_args="--max-model-len 9"), "org/M", 8001, template=template)
    assert words == (
        *("/opt/venv/bin/vllm", "serve", "org/M", "--host", "127.0.0.1", "--port=8001", "--x", '{"a": 1}'),
        *("--max-model-len", "9", "--trust-remote-code", "--disable-uvicorn-access-log"),
    )


def test_a_template_may_hold_variables_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell reads the template, so that variables are filled in here; a container gets a name of its own."""
    monkeypatch.setenv("HOME", "/home/u")
    template = "docker run --name {name} -v $HOME/.cache:/c image --model {model} --port {port} {args}"
    words = command(config(trust_remote_code=False), "org/M", 8001, template=template, name="n1")
    assert words[:8] == ("docker", "run", "--name", "n1", "-v", "/home/u/.cache:/c", "image", "--model")


BAD_TEMPLATES = {
    "no port": ("vllm serve {model} {args}", "must hold {port}"),
    "args inside a word": ("run {model} {port} --all={args}", "{args} as a word of its own"),
    "open quote": ("vllm 'serve {model}", "cannot be split"),
}


@pytest.mark.parametrize(("template", "expected"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_a_template_that_cannot_work_is_refused(template: str, expected: str) -> None:
    """A server that is not told its port would never be found ready."""
    with pytest.raises(ValueError, match="serve_command") as caught:
        config(serve_command=template)
    assert expected in str(caught.value)


def test_a_command_that_is_not_there_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both `vllm` and a template's program are looked for before anything starts."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="there is no `vllm` command here: pip install"):
        find_vllm()
    with pytest.raises(ConfigError, match="there is no command zzz here"):
        check_command("zzz {model} {port} {args}")


def test_the_configs_env_comes_on_top() -> None:
    """Proxies and tokens pass through; the config's variables win; the key does not stand in the arguments."""
    base = {"https_proxy": "http://p:3128", "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1", "A": "old"}
    built = environment(config(env={"A": "new", "VLLM_PORT": "5"}, startup_max_wait_seconds=90.5), base, "key", 7000)
    assert built == {
        "https_proxy": "http://p:3128",
        "HF_TOKEN": "hf_x",
        "HF_HUB_OFFLINE": "1",
        "A": "new",
        "VLLM_PORT": "5",
        "VLLM_API_KEY": "key",
        "VLLM_ENGINE_READY_TIMEOUT_S": "90",
    }
    assert "key" not in json.dumps(command(config(), "m", 1, template="x {model} {port} {args}"))


def test_our_own_servers_have_one_key_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key per start would make vLLM compile anew each time; the file is this user's alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = kept_key()
    assert len(key) == 32
    assert kept_key() == key
    path = tmp_path / "accuracy-gate" / "server.key"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("spoilt", ["readable by all", "torn", "no folder"])
def test_a_key_that_cannot_be_trusted_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    """A key that others may read, or half a key, gives way to a new one for this start; nothing fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "accuracy-gate" / "server.key"
    if spoilt == "no folder":
        path.parent.write_text("in the way")
    else:
        kept = kept_key()
        path.chmod(0o644 if spoilt == "readable by all" else 0o600)
        path.write_text(kept if spoilt == "readable by all" else kept[:5])
    first, second = kept_key(), kept_key()
    assert len(first) == 32
    assert first != second
