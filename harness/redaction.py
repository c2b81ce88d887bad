"""Takes secrets out of text, arguments and environments before they reach a file or a person. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

MASK = "***"
SHORTEST = 7
"""Shorter known values are left in text: masking every "EMPTY" hides more than it protects."""

_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|KEY|SECRET|PASS|PASSPHRASE|CREDENTIALS?|AUTHORIZATION|PAT)(?:_|$)|SECRET|PASSWORD|PASSWD|APIKEY",
    re.IGNORECASE,
)
_NAME_OF_PLACE = re.compile(r"_(?:FILE|PATH|DIR)$", re.IGNORECASE)
_OPTION = re.compile(r"--?[\w-]{0,40}(?:api[-_]?key|token|secret|password|passwd)", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s]+)@")

# The ends of names before a value in environment dumps, dicts and JSON. Lower-case ones are listed closely, for a
# model's `eos_token`, `max_tokens` and `cache_key` are no secrets.
_NAMED = (
    r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?"
    r"|(?i:api[_-]?key|(?:hf|hub|api|auth|access|session|security|refresh|github)[_-]token"
    r"|secret(?:[_-]access)?(?:[_-]key)?|password|passwd))"
    r"[\"']?\s{0,3}[=:]\s{0,3}[\[(]?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What a secret looks like."""

    hint: re.Pattern[str]
    """Found in the lower-case text wherever the shape is, thirty times as quickly: logs are large, secrets rare."""
    pattern: re.Pattern[str]
    replacement: str


def _shape(hint: str, pattern: str, replacement: str) -> _Shape:
    return _Shape(hint=re.compile(hint), pattern=re.compile(pattern), replacement=replacement)


_NAMED_HINT = r"(?:token|key|secret|password|passwd|credentials?)[\"']?\s{0,3}[=:]"
_SHAPES = (
    _shape(
        r"hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[abprs]-|akia|asia",
        r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
        r"|nvapi-[\w-]{16,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}\b)",
        MASK,
    ),
    _shape(r"bearer[ \t]", r"(?i)\b(Bearer[ \t]{1,3})[\w.~+/=-]{6,}", rf"\1{MASK}"),
    _shape(r"basic[ \t]", r"(?i)\b(Basic[ \t]{1,3})[\w+/=-]{12,}", rf"\1{MASK}"),
    _shape(r"://", r"(://)[^/\s?#\"']+@", rf"\1{MASK}@"),
    _shape(
        r"(?:signature|credential|token|key|sig)=",
        r"(?i)([?&](?:[\w-]{0,40}(?:signature|credential|token|key)|sig)=)[^&\s\"'#]+",
        rf"\1{MASK}",
    ),
    _shape(
        r"(?:key|token|secret|password|passwd)[=\t ]",
        rf"(?i)({_OPTION.pattern}(?:=|[ \t]{{1,3}})[\"']?)(?!--)[^\s\"']+",
        rf"\1{MASK}",
    ),
    _shape(_NAMED_HINT, rf"({_NAMED}([\"']))(?:(?!\2).)+(?=\2)", rf"\1{MASK}"),
    _shape(
        _NAMED_HINT,
        rf"({_NAMED}[\"']?)(?!None\b|null\b|True\b|False\b)[^\s\"',;&)\]}}]+",
        rf"\1{MASK}",
    ),
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Mask the known secret values and whatever looks like a secret; doing so twice changes nothing more."""
    for form in sorted({form for value in secrets for form in _forms(value)}, key=len, reverse=True):
        text = text.replace(form, MASK)
    lower = text.lower()
    for shape in _SHAPES:
        if shape.hint.search(lower):
            text = shape.pattern.sub(shape.replacement, text)
    return text


def is_secret_name(name: str) -> bool:
    """Tell whether a variable of this name holds a secret; one that names a file does not."""
    return _NAME.search(name) is not None and _NAME_OF_PLACE.search(name) is None


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """Pick the values worth masking out of an environment: of secret names, and passwords in URLs."""
    found = {value for name, value in env.items() if is_secret_name(name)}
    found.update(password for value in env.values() for password in _URL_PASSWORD.findall(value))
    return tuple(sorted(value for value in found if len(value) >= SHORTEST))


def redact_env(env: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment with its secrets masked."""
    known = secret_values(env)
    return {name: MASK if value and is_secret_name(name) else redact(value, known) for name, value in env.items()}


def redact_argv(argv: Sequence[str], secrets: Iterable[str] = ()) -> list[str]:
    """Copy a command with its secrets masked: all values after `--api-key`, for it may take several."""
    known = tuple(secrets)
    shown: list[str] = []
    hiding = False
    for argument in argv:
        is_option = argument.startswith("--")
        shown.append(MASK if hiding and not is_option else redact(argument, known))
        hiding = _OPTION.fullmatch(argument) is not None or (hiding and not is_option)
    return shown


def _forms(value: str) -> list[str]:
    """List how a secret may be written in a log: as it is, in a URL, in JSON, line by line."""
    forms = [value, quote(value, safe=""), json.dumps(value)[1:-1], *value.splitlines()]
    return [form for form in forms if len(form) >= SHORTEST]
