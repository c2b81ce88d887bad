"""What the sample cache takes two askings to be the same by, and what its files are worth after an accident."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from harness.backends.base import (
    BackendInfo,
    ChatMessage,
    ContinuationScore,
    Failure,
    GenerateRequest,
    Generation,
    LoglikelihoodRequest,
    Loglikelihoods,
    Request,
    Response,
    RollingLoglikelihood,
    RollingRequest,
    Sampling,
)
from harness.backends.cached import CacheMode, check_cacheable, request_keys
from harness.commands import cache_command
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.sample_identity import Identity, answering_arguments, identity_of
from harness.sample_store import SampleStore, is_stored, stored_identities
from harness.weights_digest import BLOCK, WHOLE, file_digest, folder_digest

COMMIT = "0123456789abcdef" * 2 + "01234567"
IDENTITY = Identity(
    engine="vllm",
    version="0.11.0",
    model="org/model",
    revision=COMMIT,
    arguments=("--dtype", "bfloat16", "--max-model-len", "4096"),
    env={"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"},
    tokenizer="t",
    template="c",
    extra={"gpus": ["H200"]},
)
IDENTITIES = {
    "engine": replace(IDENTITY, engine="sglang"),
    "version": replace(IDENTITY, version="0.11.1"),
    "model": replace(IDENTITY, model="org/other"),
    "revision": replace(IDENTITY, revision="f" * 40),
    "arguments": replace(IDENTITY, arguments=("--dtype", "float16", "--max-model-len", "4096")),
    "arguments-last": replace(IDENTITY, arguments=("--dtype", "bfloat16", "--max-model-len", "8192")),
    "arguments-more": replace(IDENTITY, arguments=(*IDENTITY.arguments, "--enforce-eager")),
    "env": replace(IDENTITY, env={"VLLM_ATTENTION_BACKEND": "FLASHINFER"}),
    "env-more": replace(IDENTITY, env={**IDENTITY.env, "VLLM_USE_DEEP_GEMM": "1"}),
    "tokenizer": replace(IDENTITY, tokenizer="u"),
    "template": replace(IDENTITY, template="d"),
    "extra": replace(IDENTITY, extra={"gpus": ["B200"]}),
}
SAMPLING = Sampling(max_tokens=8, stop=("\n",))
GENERATE = GenerateRequest(prompt="q", sampling=SAMPLING)
CHAT = GenerateRequest(
    prompt=(ChatMessage(role="user", content="q"),), sampling=SAMPLING, chat_template_kwargs={"a": 1, "b": 2}
)
LIKELY = LoglikelihoodRequest(context="c", continuations=(" x", " y"))
ROLLING = RollingRequest(text="t")
OTHER_REQUESTS: dict[str, tuple[Request, Request]] = {
    "prompt": (GENERATE, replace(GENERATE, prompt="r")),
    "chat": (GENERATE, replace(GENERATE, prompt=(ChatMessage(role="user", content="q"),))),
    "role": (CHAT, replace(CHAT, prompt=(ChatMessage(role="system", content="q"),))),
    "turns": (CHAT, replace(CHAT, prompt=(ChatMessage(role="user", content="q"),) * 2)),
    "max_tokens": (GENERATE, replace(GENERATE, sampling=replace(SAMPLING, max_tokens=9))),
    "temperature": (GENERATE, replace(GENERATE, sampling=replace(SAMPLING, temperature=0.5))),
    "temperature-none": (GENERATE, replace(GENERATE, sampling=replace(SAMPLING, temperature=None))),
    "top_p": (GENERATE, replace(GENERATE, sampling=replace(SAMPLING, top_p=0.9))),
    "top_k": (GENERATE, replace(GENERATE, sampling=replace(SAMPLING, top_k=5))),
    "seed": (GENERATE, replace(GENERATE, sampling=replace(SAMPLING, seed=1))),
    "stop": (GENERATE, replace(GENERATE, sampling=replace(SAMPLING, stop=("\n", "x")))),
    "reasoning_effort": (CHAT, replace(CHAT, reasoning_effort="low")),
    "template_kwargs": (CHAT, replace(CHAT, chat_template_kwargs={"a": 1, "b": 3})),
    "template_kwargs-order": (CHAT, replace(CHAT, chat_template_kwargs={"b": 2, "a": 1})),
    "truncate_prompt": (GENERATE, replace(GENERATE, truncate_prompt=True)),
    "context": (LIKELY, replace(LIKELY, context="d")),
    "continuations": (LIKELY, replace(LIKELY, continuations=(" x",))),
    "continuations-order": (LIKELY, replace(LIKELY, continuations=(" y", " x"))),
    "pairwise": (LIKELY, replace(LIKELY, pairwise=True)),
    "move_spaces": (LIKELY, replace(LIKELY, move_spaces=False)),
    "text": (ROLLING, replace(ROLLING, text="u")),
    "max_window": (ROLLING, replace(ROLLING, max_window=64)),
    "window-context": (ROLLING, replace(ROLLING, context=2)),
    "kind": (LoglikelihoodRequest(context="t", continuations=()), ROLLING),
}
RESPONSES: dict[str, Response] = {
    "generation": Generation(
        text="42 \U0001f600 é\u2028\n", finish_reason="stop", generated_tokens=3, prompt_tokens=9, latency=1.25
    ),
    "half-a-pair": Generation(
        text="\ud83d", finish_reason="length", generated_tokens=None, prompt_tokens=None, latency=0.5, reasoning="so"
    ),
    "no-text": Generation(
        text=None, finish_reason="stop", generated_tokens=1, prompt_tokens=2, latency=0.5, refusal="no", attempts=3
    ),
    "likelihoods": Loglikelihoods(
        scores=(
            ContinuationScore(logprob=-0.1, tokens=1, bytes=2, greedy=True),
            ContinuationScore(logprob=-1 / 3, tokens=2, bytes=3, greedy=False),
        ),
        latency=0.25,
        fallbacks=("split",),
    ),
    "rolling": RollingLoglikelihood(logprob=-12.5, tokens=7, bytes=30, windows=2, latency=0.75),
}


def key(request: Request, pass_number: int = 1) -> str:
    return next(request_keys([request], pass_number))


def answer(text: str) -> Generation:
    return Generation(text=text, finish_reason="stop", generated_tokens=1, prompt_tokens=1, latency=0.5)


def store_one(folder: Path, identity: Identity, name: str, response: Response) -> bool:
    with SampleStore(folder, identity) as store:
        return store.put(name, response)


def found(folder: Path, identity: Identity, name: str) -> Response | None:
    with SampleStore(folder, identity) as store:
        return store.get(name)


@pytest.mark.parametrize("name", IDENTITIES)
def test_every_part_of_an_identity_asks_again(name: str, tmp_path: Path) -> None:
    """An answer of one identity is none of another that differs in a single part, and the part is named."""
    store_one(tmp_path, IDENTITY, key(GENERATE), answer("x"))
    other = IDENTITIES[name]
    assert found(tmp_path, IDENTITY, key(GENERATE)) is not None
    assert found(tmp_path, other, key(GENERATE)) is None
    (difference,) = IDENTITY.explain(other)
    assert difference.startswith(name.partition("-")[0])


def test_the_table_of_identities_is_whole() -> None:
    """A part that is added to Identity needs a row above."""
    assert {name.partition("-")[0] for name in IDENTITIES} == {part.name for part in fields(Identity)}


@pytest.mark.parametrize("name", OTHER_REQUESTS)
def test_every_part_of_a_request_asks_again(name: str) -> None:
    """Two requests that differ in a single field have two keys, and equal ones have one."""
    one, other = OTHER_REQUESTS[name]
    assert key(one) != key(other)
    assert key(one) == key(replace(one))


def test_the_table_of_requests_is_whole() -> None:
    """A field that is added to a request or to Sampling needs a row above."""
    told = set(OTHER_REQUESTS) | {"sampling", "chat_template_kwargs"}
    types = (GenerateRequest, LoglikelihoodRequest, RollingRequest, Sampling)
    assert {part.name for kind in types for part in fields(kind)} - told == set()


def test_passes_and_repeated_questions_are_draws_of_their_own() -> None:
    """Neither another pass nor the same question again in one pass is answered by the entry of the first."""
    keys = [*request_keys([GENERATE, CHAT, GENERATE], 1), *request_keys([GENERATE, CHAT, GENERATE], 2)]
    assert len(set(keys)) == 6
    assert list(request_keys([CHAT, GENERATE, GENERATE], 1)) == [keys[1], keys[0], keys[2]]


def test_a_part_that_is_no_json_is_refused() -> None:
    """A template argument that cannot be told apart by its text gets no key."""
    with pytest.raises(TypeError, match="which is no JSON"):
        key(replace(CHAT, chat_template_kwargs={"a": {1}}))


@pytest.mark.parametrize("name", RESPONSES)
def test_an_answer_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """Text, scores and latency are those of the asking; `attempts` 0 says that nobody was asked."""
    response = RESPONSES[name]
    assert store_one(tmp_path, IDENTITY, key(GENERATE), response)
    stored = found(tmp_path, IDENTITY, key(GENERATE))
    assert stored == replace(response, attempts=0)
    assert stored is not None
    assert is_stored(stored)
    assert not is_stored(response)


@pytest.mark.parametrize(
    "response",
    [
        Failure(kind="timeout", detail="", attempts=1),
        Failure(kind="aborted", detail="", attempts=1, status=200),
        RollingLoglikelihood(logprob=float("nan"), tokens=1, bytes=1, windows=1, latency=0.1),
    ],
    ids=["timeout", "aborted", "nan"],
)
def test_what_is_no_answer_is_not_stored(response: Response, tmp_path: Path) -> None:
    """A failure, and a score that JSON cannot hold, leave not even a file."""
    assert not store_one(tmp_path, IDENTITY, key(GENERATE), response)
    assert list(tmp_path.iterdir()) == []


def test_the_later_of_two_answers_counts(tmp_path: Path) -> None:
    """Writing again replaces, whichever file comes first by name."""
    for text in ("old", "new"):
        store_one(tmp_path, IDENTITY, key(GENERATE), answer(text))
        time.sleep(0.002)  # the clock of the entries counts milliseconds
    late, early = sorted(tmp_path.iterdir(), reverse=True)
    late.rename(early.with_name(f"{IDENTITY.digest()}.{'0' * 13}-{'0' * 8}.jsonl"))
    stored = found(tmp_path, IDENTITY, key(GENERATE))
    assert isinstance(stored, Generation)
    assert stored.text == "new"


@pytest.mark.parametrize("cut", [1, 2, 60, 120])
def test_a_torn_tail_is_an_entry_less(cut: int, tmp_path: Path) -> None:
    """What a killed writer left of a line is ignored; the lines before it are all there, and others can be added."""
    with SampleStore(tmp_path, IDENTITY) as store:
        for number in range(3):
            store.put(f"{number:064x}", answer(f"answer {number}"))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    assert [found(tmp_path, IDENTITY, f"{n:064x}") is not None for n in range(3)] == [True, True, False]
    store_one(tmp_path, IDENTITY, f"{2:064x}", answer("again"))
    assert all(found(tmp_path, IDENTITY, f"{n:064x}") for n in range(3))


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:30],
        lambda raw: b"nonsense\n" + raw,
        lambda raw: b"[1]\n" + raw.partition(b"\n")[2],
        lambda raw: raw.replace(b'"digest":"', b'"digest":"0', 1),
        lambda raw: raw.replace(b'"finish_reason"', b'"finish_because"'),
        lambda raw: raw.replace(b'"kind":"Generation"', b'"kind":"Oracle"'),
        lambda raw: raw.partition(b"\n")[0] + b"\n" + b"\0" * 300,
    ],
    ids=["empty", "torn-header", "no-header", "other-json", "other-digest", "other-field", "other-kind", "zeros"],
)
def test_a_damaged_file_answers_nothing(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """What cannot be read is asked again; it neither answers nor stops a run, and can be listed and deleted."""
    store_one(tmp_path, IDENTITY, key(GENERATE), answer("x"))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert found(tmp_path, IDENTITY, key(GENERATE)) is None
    assert len(stored_identities(tmp_path)) == 1
    assert cache("--folder", tmp_path, "clear", "--yes") == 0
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from test_sample_cache import IDENTITY, answer
from harness.sample_store import SampleStore
with SampleStore(Path(sys.argv[1]), IDENTITY) as store:
    for number in range(int(sys.argv[2])):
        assert store.put(f"{number:064x}", answer("x" * 3000))
        print(number, flush=True)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Start a process that stores so many answers and prints the number of each one stored."""
    started: list[subprocess.Popen[str]] = []

    def start(count: int) -> subprocess.Popen[str]:
        here = Path(__file__).parent
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(count), str(here)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here.parents[1]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_writer_killed_half_way_has_lost_nothing(
    writer: Callable[[int], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """After SIGKILL every answer that `put` said was stored is there, and a second writer adds the rest."""
    process = writer(1_000_000)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 200:
            break
    process.send_signal(signal.SIGKILL)
    told = [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.wait()
    count = max(told, default=200) + 1
    with SampleStore(tmp_path, IDENTITY) as store:
        assert all(store.get(f"{number:064x}") == replace(answer("x" * 3000), attempts=0) for number in range(count))


def test_two_processes_write_at_once(writer: Callable[[int], subprocess.Popen[str]], tmp_path: Path) -> None:
    """Neither waits for the other nor tears its lines, and both's answers are found."""
    for process in (writer(300), writer(300)):
        assert process.wait() == 0
    assert len(list(tmp_path.iterdir())) == 2
    (stored,) = stored_identities(tmp_path)
    assert (stored.entries, len(stored.segments)) == (300, 2)
    for path in tmp_path.iterdir():
        assert len([json.loads(line) for line in path.read_bytes().splitlines()]) == 301


def test_a_full_disk_warns_once_and_ends_no_run(tmp_path: Path) -> None:
    """An answer that cannot be stored is no reason to lose the evaluation."""
    (tmp_path / "file").write_text("")
    with SampleStore(tmp_path / "file" / "below", IDENTITY) as store:
        with pytest.warns(UserWarning, match="the sample cache cannot be written: Not a directory"):
            assert not store.put(key(GENERATE), answer("x"))
        assert not store.put(key(CHAT), answer("x"))


SECRET = "hf_" + "s3cret" * 5


def test_secrets_reach_no_file(tmp_path: Path) -> None:
    """Whatever is secret among arguments, environment and the rest goes into the digest alone."""
    identity = replace(
        IDENTITY,
        arguments=("--some-api-key", "opensesame1"),
        env={"MY_TOKEN": SECRET},
        extra={"engine": {"api_key": "opensesame2"}, "base_url": "http://me:opensesame3@host"},
    )
    store_one(tmp_path, identity, key(GENERATE), answer("x"))
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert "sesame" not in text
    assert SECRET not in text
    other = replace(identity, env={"MY_TOKEN": SECRET + "x"})
    assert identity.digest() != other.digest()
    assert identity.explain(other) == ("a value that is kept secret",)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--port 8000 --dtype half", "--dtype half"),
        ("--port=8000 --dtype half", "--dtype half"),
        ("--served_model_name a b --dtype half", "--dtype half"),
        ("--api-key k1 k2 --enforce-eager", "--enforce-eager"),
        ("--disable-log-requests --max-num-seqs 4", "--max-num-seqs 4"),
        ("docker run image --host {host} {model} {args}", "docker run image {model} {args}"),
        ("--some-new-flag 1", "--some-new-flag 1"),
        ("-tp 2 --seed 0", "-tp 2 --seed 0"),
    ],
    ids=["value", "equals", "several-values", "keys", "no-value", "template", "unknown", "short"],
)
def test_arguments_that_cannot_change_answers_are_left_out(words: str, kept: str) -> None:
    """Addresses, names, keys and logs; whatever is not known to be harmless stays."""
    assert answering_arguments(words.split()) == tuple(kept.split())


def config(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"model_name": "org/model", "accuracy_threshold": 0.5, **keys})


OURS = {"started_by": "this run"}
INFO = BackendInfo(engine="server", version="0.11.0", model="org/model")
TEMPLATE = "serve {model} --port {port} {args}"


def identity(environ: dict[str, str] | None = None, **keys: Any) -> Identity:
    pinned = {"server_args": f"--revision {COMMIT}", "serve_command": TEMPLATE}
    return identity_of(config(**{**pinned, **keys}), OURS, INFO, environ=environ or {})


def test_an_unpinned_hub_name_is_refused() -> None:
    """A name that may stand for other weights tomorrow gets no key, and the message says what to do."""
    for arguments in ("", "--revision main", "--revision v1.0"):
        with pytest.raises(ConfigError, match="pin --revision to a commit of 40 hex digits"):
            identity(server_args=arguments)
    for arguments in ("--tokenizer org/t", '--speculative-config \'{"model": "org/draft"}\''):
        with pytest.raises(ConfigError, match=r"which weights org/(t|draft) stands for is not certain"):
            identity(server_args=f"--revision {COMMIT} {arguments}")
    assert identity().revision == COMMIT


def test_the_hubs_cache_says_which_commit_was_loaded(tmp_path: Path) -> None:
    """For a server of this machine; one in a container keeps its own downloads."""
    refs = tmp_path / "hub" / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    environ = {"HF_HOME": str(tmp_path)}
    assert identity(environ, server_args="").revision == COMMIT
    assert identity(environ, server_args="", env={"VLLM_USE_MODELSCOPE": "0"}).revision == COMMIT
    refused: tuple[dict[str, Any], ...] = (
        {"env": {"VLLM_USE_MODELSCOPE": "True"}},
        {"env": {"HF_HUB_CACHE": str(tmp_path / "none")}},
        {"serve_command": "docker run --name {name} image {model} --port {port} {args}"},
    )
    for keys in refused:
        with pytest.raises(ConfigError, match="pin --revision"):
            identity(environ, server_args="", **keys)


def test_a_server_of_somebody_else_needs_a_label() -> None:
    """What it was started with cannot be seen; with the user's word, what it serves still counts."""
    theirs = {"started_by": "somebody else", "base_url": "http://127.0.0.1:8000"}
    with pytest.raises(ConfigError, match="an engine that this run starts"):
        identity_of(config(), theirs, INFO, environ={})
    told: list[Identity] = [
        identity_of(
            config(), theirs, replace(INFO, details={"models": [{**model, "created": now}]}), environ={}, label="mine"
        )
        for now, model in enumerate(({"id": "m"}, {"id": "m"}, {"id": "m", "max_model_len": 5}))
    ]
    assert [one.digest() == told[0].digest() for one in told] == [True, True, False]


def test_an_engine_without_a_version_is_refused() -> None:
    """An update would not be seen."""
    with pytest.raises(ConfigError, match="does not tell its version"):
        identity_of(config(serve_command=TEMPLATE), OURS, replace(INFO, version="unknown"), environ={})


@pytest.mark.parametrize(
    ("environ", "same"),
    [
        ({"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}, False),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, False),
        ({"HF_TOKEN": "t", "HF_HOME": "/x", "VLLM_LOGGING_LEVEL": "DEBUG"}, True),
        ({"PATH": "/bin", "LANG": "C"}, True),
    ],
    ids=["backend", "precision", "harmless", "unrelated"],
)
@pytest.mark.parametrize("of_config", [True, False], ids=["config", "shell"])
def test_variables_that_choose_kernels_count(environ: dict[str, str], same: bool, of_config: bool) -> None:
    """Wherever they were set; of the config's own every variable not known to be harmless."""
    other = identity(env=environ) if of_config else identity(environ)
    unrelated = of_config and "LANG" in environ
    assert (other.digest() == identity().digest()) == (same and not unrelated)


def test_files_that_arguments_name_count_by_their_content(tmp_path: Path) -> None:
    """A template or a config changed in place is another identity."""
    path = tmp_path / "template.jinja"
    digests = []
    for content in ("{{ a }}", "{{ b }}"):
        path.write_text(content)
        for arguments in (
            f"--chat-template {path}",
            f"--logits-config={path}",
            f'--hf-overrides \'{{"a": ["{path}"]}}\'',
        ):
            digests.append(identity(server_args=f"--revision {COMMIT} {arguments}").digest())
    assert len(set(digests)) == 6
    assert identity(server_args=f"--revision {COMMIT} --chat-template {path}").digest() == digests[3]


def test_local_weights_are_known_by_their_content(tmp_path: Path) -> None:
    """A folder's digest changes with any file's name or content; one of no model is not walked through."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"\0" * 100)
    before = folder_digest(folder)
    assert identity(model_name=str(folder), server_args="").revision == f"folder {before}"
    weights.write_bytes(b"\0" * 99 + b"\1")
    changed = folder_digest(folder)
    weights.rename(folder / "other.safetensors")
    (folder / ".lock").write_text("hidden files are no weights")
    assert len({before, changed, folder_digest(folder)}) == 3
    assert identity(server_args=f"--revision {COMMIT} --x {tmp_path}").extra["files"] == {}


def sparse_weights(path: Path, tensors: int, size: int) -> list[int]:
    """Write a safetensors file of zeros that takes no space; return where its tensors begin."""
    header = json.dumps(
        {f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]} for n in range(tensors)}
    ).encode()
    data = 8 + len(header)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(data + tensors * size)
    return [data + n * size for n in range(tensors)]


def test_every_tensor_of_large_weights_is_looked_at(tmp_path: Path) -> None:
    """Of a large file the ends and the middle of each tensor, and the time of change for what lies between."""
    path = tmp_path / "model.safetensors"
    size = WHOLE // 2
    starts = sparse_weights(path, 3, size)
    times = (1_000_000_000, 1_000_000_000)
    os.utime(path, ns=times)
    digests = [file_digest(path)]
    for at in (starts[1], starts[1] + size // 2 + BLOCK - 1, starts[2] + size - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\1")
        os.utime(path, ns=times)
        digests.append(file_digest(path))
    assert len(set(digests)) == 4
    os.utime(path, ns=(0, 0))
    assert file_digest(path) not in digests


@pytest.mark.parametrize("key", ["prefix_cache_check", "kv_offload_check"])
def test_checks_of_the_server_at_work_are_not_answered_from_the_cache(key: str) -> None:
    """A check that could not be made is never passed; writing spares nothing and is let be."""
    checked = config(**{key: True, **({"server_args": "--x"} if key == "kv_offload_check" else {})})
    for mode in (CacheMode.READ, CacheMode.READWRITE):
        with pytest.raises(ConfigError, match=key):
            check_cacheable(checked, mode)
    check_cacheable(checked, CacheMode.WRITE)
    with pytest.raises(ConfigError, match="no further run of a baseline"):
        check_cacheable(config(), CacheMode.READ, saves_baseline=True)


def cache(*arguments: object) -> int:
    """Run `accuracy-gate cache` in this process."""
    parser = argparse.ArgumentParser()
    cache_command.add_options(parser)
    return cache_command.run(parser.parse_args([str(argument) for argument in arguments]))


def aged(folder: Path, identity: Identity, days: float, size: int = 10) -> None:
    """Store one answer and put its last use in the past."""
    store_one(folder, identity, key(GENERATE), answer("x" * size))
    then = time.time() - days * 86400
    for path in folder.glob(f"{identity.digest()}*"):
        os.utime(path, (then, then))


def left(folder: Path) -> list[str]:
    return [one.facts["model"] for one in stored_identities(folder)]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A cache of three models, last used 40, 20 and 2 days ago."""
    for model, days in (("old", 40), ("middle", 20), ("new", 2)):
        aged(tmp_path, replace(IDENTITY, model=model), days, size=2000)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "models"),
    [
        (["--older-than", "30d"], ["middle", "new"]),
        (["--older-than", "24h"], []),
        (["--older-than", "6w"], ["old", "middle", "new"]),
        (["--max-size", "10GB"], ["old", "middle", "new"]),
        (["--max-size", "6KB"], ["middle", "new"]),
        (["--max-size", "0"], []),
        (["--older-than", "30d", "--max-size", "3KB"], ["new"]),
    ],
)
def test_pruning_takes_the_least_recently_used(three: Path, options: list[str], models: list[str]) -> None:
    """What is older than said goes, and of too much the longest unused first."""
    assert cache("--folder", three, "prune", *options) == 0
    assert left(three) == models


def test_an_answer_that_was_used_is_kept(three: Path) -> None:
    """A hit makes an identity the most recently used, whenever it was written."""
    assert found(three, replace(IDENTITY, model="old"), key(GENERATE)) is not None
    assert left(three) == ["middle", "new", "old"]


def test_what_is_being_written_is_not_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pruning and clearing leave a live writer's file."""
    with SampleStore(tmp_path, IDENTITY) as store:
        store.put(key(GENERATE), answer("x"))
        cache("--folder", tmp_path, "clear", "--yes")
        assert "but what is being written" in capsys.readouterr().out
        store.put(key(CHAT), answer("y"))
    assert found(tmp_path, IDENTITY, key(CHAT)) is not None


def test_clearing_needs_names_or_yes(three: Path) -> None:
    """Nothing is deleted without being named, by model or by the beginning of a digest."""
    for arguments in ([], ["--yes", "new"], ["nobody"], [IDENTITY.digest()[:3]]):
        with pytest.raises(ConfigError, match="cache clear"):
            cache("--folder", three, "clear", *arguments)
    with pytest.raises(ConfigError, match="say what may go"):
        cache("--folder", three, "prune")
    cache("--folder", three, "clear", "new", replace(IDENTITY, model="old").digest()[:10])
    assert left(three) == ["middle"]


def test_the_list_says_what_tells_identities_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Entries, size and last use of each, and of one model's several identities what differs."""
    aged(tmp_path, IDENTITY, 3)
    aged(tmp_path, replace(IDENTITY, version="0.12.0", model="org/model"), 1)
    aged(tmp_path, replace(IDENTITY, model="bad\x1b[2Jname"), 2)
    (tmp_path / "README.jsonl").write_text("not ours\n")
    assert cache("--folder", tmp_path, "list") == 0
    printed = capsys.readouterr().out
    assert "3 identities" in printed
    assert 'in version: "0.11.0" and "0.12.0"' in printed
    assert "\x1b" not in printed
    assert cache("--folder", tmp_path / "none", "list") == 0


@pytest.mark.parametrize("options", [["--older-than", "30"], ["--older-than", "1m"], ["--max-size", "10XB"]])
def test_a_limit_without_its_unit_is_refused(options: list[str], tmp_path: Path) -> None:
    """A time or size that could be read two ways is a mistake in the call."""
    with pytest.raises(SystemExit):
        cache("--folder", tmp_path, "prune", *options)
