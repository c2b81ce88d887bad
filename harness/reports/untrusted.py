"""Text that somebody else wrote, such as a model, made fit to be shown: it changes neither terminal nor page. Pure."""

from __future__ import annotations

import re
import unicodedata

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories that steer a terminal, turn the direction of writing, or show as nothing."""


def escaped(text: str, *, keep_newlines: bool = False) -> str:
    """Write control, format and unassigned characters as escapes; backslashes stay as they are."""
    return "".join(
        character if character == "\n" and keep_newlines else _escape(character)
        for character in (text.replace("\r\n", "\n") if keep_newlines else text)
    )


def _escape(character: str) -> str:
    if character.isascii() and character.isprintable():
        return character
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def fenced(text: str) -> str:
    """Put text in a Markdown code block that it cannot end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{escaped(text, keep_newlines=True)}\n{fence}"


def code(text: str) -> str:
    """Put text in a Markdown code span that it cannot end, fit for a table's cell too."""
    shown = escaped(text) or " "
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    ticks = "`" * (longest + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    # In a table GitHub splits cells at a bar even within code, unless it is escaped.
    return f"{ticks}{space}{shown}{space}{ticks}".replace("|", "\\|")


def html(text: str) -> str:
    """Write text so that neither Markdown nor HTML sees markup or a link in it."""
    return re.sub(r"[^\w\s.,;:()=+%-]|_|https?(?=:)|www(?=\.)", lambda found: _entities(found.group()), escaped(text))


def _entities(characters: str) -> str:
    return "".join(f"&#{ord(character)};" for character in characters)


def _columns(character: str) -> int:
    """Count the columns that a letter takes on a terminal: wide ones take two, combining marks none."""
    if character.isascii():
        return 1
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shown_width(text: str) -> int:
    """Count the columns that a text takes on a terminal."""
    return sum(map(_columns, text))


def wrapped(text: str, columns: int) -> list[str]:
    """Break text into lines of at most so many columns, at a blank where there is one near."""
    lines: list[str] = []
    for paragraph in escaped(text, keep_newlines=True).split("\n"):
        rest = paragraph
        while (end := _fitting(rest, columns)) < len(rest):
            blank = rest.rfind(" ", end // 2, end + 1)
            cut = blank if blank > 0 else end
            lines.append(rest[:cut].rstrip(" "))
            rest = rest[cut:].lstrip(" ") if blank > 0 else rest[cut:]
        lines.append(rest)
    return lines


def _fitting(text: str, columns: int) -> int:
    """Say how many characters fit, at least one."""
    used = 0
    for end, character in enumerate(text):
        used += _columns(character)
        if used > columns:
            return max(1, end)
    return len(text)
