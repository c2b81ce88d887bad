"""Where in a text the answer stands that the grader read; pure."""

from __future__ import annotations

import re

_FORMS = {
    "hash": re.compile(r"(?<!#)####(?!#)"),
    "boxed": re.compile(r"\\f?box(?:ed)?[ \t]*\{"),
    "statement": re.compile(r"(?<!\w)ans(?:wers?)?\b", re.IGNORECASE),
}
"""What stands before an answer of each form."""
_NEAR = 400
"""Characters between a form's beginning and its answer, at most."""


def find_answer(text: str | None, extracted: str | None, found_by: str | None) -> tuple[int, int] | None:
    """Find the answer that the record names, by the form it was read from; None where it cannot be told.

    The record keeps what was read and in which form, not where. The last place that fits is the one.
    """
    if not text or not extracted:
        return None
    written = _written(extracted)
    form = _FORMS.get(found_by or "")
    for begin in reversed([found.end() for found in form.finditer(text)] if form else []):
        near = written.search(text, begin, begin + _NEAR)
        if near:
            return near.span()
    last = None
    for found in written.finditer(text):
        last = found.span()
    return last


def find_gold(gold: str | None) -> tuple[int, int] | None:
    """Find the final answer of a gold text: what follows its last `####`; None where there is no such mark."""
    marker = (gold or "").rfind("####")
    answer = re.compile(r"\S.*\S|\S").search(gold or "", marker + 4) if marker >= 0 else None
    return answer.span() if answer else None


def _written(extracted: str) -> re.Pattern[str]:
    """Match an answer that is no part of a longer number; a bare number may have its thousands set apart."""
    body = ",?".join(extracted) if re.fullmatch(r"\d{4,}", extracted) else re.escape(extracted)
    before = r"(?<!\d)(?<!\d[.,])" if extracted[0].isdigit() else ""
    after = r"(?!\d|[.,]\d)" if extracted[-1].isdigit() else ""
    return re.compile(before + body + after)


def in_utf16(text: str, span: tuple[int, int] | None) -> list[int] | None:
    """Count a span as a browser does, for which a letter beyond U+FFFF is two."""
    if span is None:
        return None
    return [len(text[:end].encode("utf-16-le", "surrogatepass")) // 2 for end in span]
