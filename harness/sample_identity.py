"""Who answers, as far as answers depend on it: engine, weights, arguments, environment; half of every cache key."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.backends.base import BackendInfo
from harness.backends.registry import flags_of
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.redaction import MASK, is_secret_name, redact, redact_argv, redact_env, secret_values
from harness.servers.containers import is_container
from harness.servers.launching import flag_value
from harness.weights_digest import Revisions, named_files

SCHEMA = 1
"""Of keys and entries; part of every digest, so that a change here finds nothing of what was stored before."""

# Flags that say where a server listens, who may ask, what it is called and what it logs, with the number of words
# after each (None: all up to the next flag). Everything else may move an answer, flags of later versions included.
HARMLESS_FLAGS: Mapping[str, int | None] = {
    **dict.fromkeys(("--host", "--port", "--uds", "--root-path"), 1),
    **dict.fromkeys(("--api-key", "--served-model-name", "--disable-access-log-for-endpoints"), None),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"), 1),
    **dict.fromkeys(("--allowed-origins", "--allowed-methods", "--allowed-headers"), 1),
    **dict.fromkeys(("--uvicorn-log-level", "--max-log-len", "--log-config-file", "--otlp-traces-endpoint"), 1),
    **dict.fromkeys(("--disable-uvicorn-access-log", "--enable-log-requests", "--no-enable-log-requests"), 0),
    **dict.fromkeys(("--disable-log-requests", "--disable-log-stats", "--no-disable-log-stats"), 0),
    **dict.fromkeys(("--download-dir",), 1),  # where weights lie; which they are is the revision's to say
}
# Tokens that only let in, places, logs, proxies, and which of several GPUs of a kind is used.
HARMLESS_VARIABLES = re.compile(
    r"HF_TOKEN|HUGGING_FACE_HUB_TOKEN|VLLM_API_KEY|HF_HOME|HF_HUB_(?!OFFLINE$)\w+|XDG_\w+|TMPDIR|\w+_PROXY|\w+_proxy"
    r"|VLLM_(?:PORT|HOST_IP|RPC_BASE_PATH|CACHE_ROOT|ASSETS_CACHE|NO_USAGE_STATS|DO_NOT_TRACK|USAGE_\w+|\w*LOGGING\w*)"
    r"|VLLM_(?:ENGINE_READY_TIMEOUT_S|LOG_STATS_INTERVAL|SERVER_DEV_MODE)|DO_NOT_TRACK|PYTHONUNBUFFERED|TQDM_\w+"
    r"|(?:CUDA|HIP|ROCR|GPU)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|VLLM_CPU_KVCACHE_SPACE"
)
# Variables that choose kernels or precisions wherever they were set, the shell that started us included.
INHERITED = re.compile(
    r"(?:VLLM|SGLANG|SGL|TORCH|PYTORCH|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|FLASHINFER|FLASH_ATTN|TRITON|TRANSFORMERS|HIP|HSA"
    r"|ROCM|AITER|XLA|TPU|ONEDNN|DNNL|OMP|MKL)_\w+"
)
PACKAGES = ("vllm", "sglang", "sgl-kernel", "torch", "transformers", "tokenizers", "flashinfer-python", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that makes one server's answers its own; two that differ in anything share no entry."""

    engine: str
    version: str
    model: str
    revision: str
    """A commit, a package's version, or a digest of local weights."""
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    template: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """Name the identity; secrets among its values go into this alone."""
        return _sha256(json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True, allow_nan=False))

    def facts(self) -> dict[str, Any]:
        """Say the same for a person, with secrets masked."""
        secrets = secret_values(self.env)
        shown = {"arguments": redact_argv(self.arguments, secrets), "env": redact_env(self.env)}
        return {**asdict(self), **shown, "extra": _masked(self.extra, secrets)}

    def explain(self, other: Identity) -> tuple[str, ...]:
        """Name what differs, with both values; empty where nothing does."""
        if self.digest() == other.digest():
            return ()
        return differing(self.facts(), other.facts()) or ("a value that is kept secret",)


def _masked(value: Any, secrets: Sequence[str], name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(inner, secrets, key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(inner, secrets, name) for inner in value]
    if not isinstance(value, str):
        return value
    return MASK if is_secret_name(name) else redact(value, secrets)


def differing(mine: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Name what differs between two identities' facts, with both values."""
    a, b = dict(_flat(mine)), dict(_flat(other))
    return tuple(
        f"{name}: {json.dumps(a.get(name))} and {json.dumps(b.get(name))}"
        for name in dict.fromkeys((*a, *b))
        if a.get(name) != b.get(name)
    )


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {key}", inner) for key, inner in value.items())
        else:
            yield name, list(value) if isinstance(value, tuple) else value


def identity_of(
    config: ModelConfig,
    description: Mapping[str, Any],
    info: BackendInfo,
    *,
    environ: Mapping[str, str],
    serve_command: str | None = None,
    gpus: Sequence[str] = (),
    label: str | None = None,
) -> Identity:
    """Collect an engine's identity from its config, what it says of itself, and the files that arguments name.

    `description` is `Engine.description`, `environ` this process's environment, `serve_command` the template where the
    config has none, `gpus` their names, and `label` the user's word for a server that somebody else started. How code
    behind one version differs, how a batch was made up, and files that a named file names are not seen. Raises
    ConfigError where it cannot be told what answers: a cache that may answer for other weights is worse than none.
    """
    template = config.serve_command or serve_command
    env = {**_inherited(environ), **{k: v for k, v in config.env.items() if not HARMLESS_VARIABLES.fullmatch(k)}}
    words = tuple(os.path.expandvars(word) for word in shlex.split(template or ""))
    arguments = answering_arguments((*words, *config.arguments))
    extra: dict[str, Any] = {
        "backend": config.backend,
        "engine": config.engine.model_dump(mode="json") if flags_of(config.backend) is None else "in the arguments",
        "trust_remote_code": config.trust_remote_code,
        "gpus": sorted(gpus),
        "cpu": "" if gpus else _cpu(),
        "files": dict(named_files((*arguments, *env.values()))),
    }
    if description.get("started_by") != "this run":
        return _labelled(label, description, info, extra)
    if info.version == "unknown":
        raise ConfigError("--cache: the engine does not tell its version: another's answers might be taken for its own")
    if template is None:
        _refuse_editable()
        extra["packages"] = {name: _installed(name) for name in PACKAGES}
    theirs = template is None or not is_container(words)
    find = Revisions(environ={**environ, **config.env}, hub_cache_is_theirs=theirs)
    own = flag_value(config.arguments, "--revision") or config.engine.options.get("revision")
    revision = find.of(config.model_name, own, "--revision")
    extra["drafts"] = list(_drafts(config.arguments, find))
    return Identity(
        engine=config.backend if info.engine == "server" else info.engine,
        version=info.version,
        model=config.model_name,
        revision=revision,
        arguments=arguments,
        env=env,
        tokenizer=_tokenizer(config, find) or revision,
        template=_template(config.arguments) or revision,
        extra=extra,
    )


def _labelled(
    label: str | None, description: Mapping[str, Any], info: BackendInfo, extra: Mapping[str, Any]
) -> Identity:
    """Take the user's word for what cannot be seen of somebody else's server, beside what it tells."""
    if label is None:
        raise ConfigError("--cache needs an engine that this run starts: what another was started with cannot be seen")
    models = info.details.get("models", ())
    told = [{key: model.get(key) for key in ("id", "root", "max_model_len")} for model in models]  # not `created`
    seen = {**extra, "label": label, "base_url": description.get("base_url"), "models": told}
    return Identity(engine=info.engine, version=info.version, model=info.model, revision=f"label {label}", extra=seen)


def _tokenizer(config: ModelConfig, find: Revisions) -> str | None:
    """Name the tokenizer where it is not the model's own: the engine's, and ours for scoring over HTTP."""
    flag = flag_value(config.arguments, "--tokenizer")
    pinned = flag_value(config.arguments, "--tokenizer-revision")
    found = [find.of(name, pinned, "--tokenizer-revision") for name in (flag, config.tokenizer) if name is not None]
    return " ".join(found) or None


def answering_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Leave out the arguments that cannot change an answer; order and spelling of the rest stay as they are."""
    kept: list[str] = []
    skip: int | None = 0
    for word in words:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            name = name.replace("_", "-")
            harmless = name in HARMLESS_FLAGS
            skip = 0 if equals or not harmless else HARMLESS_FLAGS[name]
            if harmless:
                continue
        elif skip is None:
            continue
        elif skip > 0:
            skip -= 1
            continue
        kept.append(word)
    return tuple(kept)


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if INHERITED.fullmatch(name) and not HARMLESS_VARIABLES.fullmatch(name)
    }


def _drafts(arguments: Sequence[str], find: Revisions) -> Iterator[str]:
    """Name the weights of a draft model: which tokens it proposes moves the batches that the model verifies."""
    for flag in ("--speculative-config", "-sc"):
        for spoken in _json_objects(flag_value(arguments, flag)):
            if isinstance(name := spoken.get("model"), str):
                yield find.of(name, spoken.get("revision"), '"revision" in --speculative-config')


def _json_objects(text: str | None) -> Iterator[dict[str, Any]]:
    try:
        value = json.loads(text or "null")
    except ValueError:
        return
    if isinstance(value, dict):
        yield value


def _template(arguments: Sequence[str]) -> str | None:
    said = flag_value(arguments, "--chat-template")
    if said is None:
        return None
    found = dict(named_files((said,)))
    return _sha256(found.get(said, said))


def _refuse_editable() -> None:
    """An editable install keeps its version while its code changes under it, which is the very thing to be measured."""
    for name in ("vllm", "vllm-cpu", "sglang", "transformers"):
        try:
            origin = json.loads(metadata.distribution(name).read_text("direct_url.json") or "{}")
        except (metadata.PackageNotFoundError, ValueError):
            continue
        if origin.get("dir_info", {}).get("editable"):
            raise ConfigError(f"--cache: {name} is an editable install, whose version stays while its code changes")


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
