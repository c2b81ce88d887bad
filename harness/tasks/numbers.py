"""Numbers as models write them: found in text, and read exactly.

Every pattern is bounded or possessive, so that reading is linear in the text whatever a model prints.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import islice

Number = Decimal | Fraction
"""An exact value. Decimals are kept as written, since `int` and `str(int)` refuse over 4,300 digits."""

MAX_EXPONENT_DIGITS = 4
MAX_FRACTION_DIGITS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number where it stands in a text, its sign and the currency between them included.

    `value` is None for what is written as a number and has no value here: a division by zero, an exponent of
    more than `MAX_EXPONENT_DIGITS`, a fraction longer than `MAX_FRACTION_DIGITS`.
    """

    value: Number | None
    start: int
    end: int


class _AsciiForms(dict[int, int]):
    """Translation table to ASCII that decides each character once, when it is first met."""

    def __missing__(self, code: int) -> int:
        digit = unicodedata.decimal(chr(code), -1)
        self[code] = code if digit < 0 else ord("0") + digit
        return self[code]


_ASCII = _AsciiForms(
    {
        ord(form): ord(ascii_form)
        for ascii_form, forms in {
            "-": "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d",
            "/": "\u2044\u2215\uff0f",
            ".": "\u066b\uff0e",
            ",": "\u066c",
            "$": "\ufe69\uff04",
            "=": "\uff1d",
            ":": "\uff1a",
            "+": "\uff0b",
            "#": "\uff03",
            "(": "\uff08",
            ")": "\uff09",
        }.items()
        for form in forms
    }
)
_WIDE_GROUP = re.compile(r"(?<=[０-９])，(?=[０-９]{3})")
_SUPERSCRIPTS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")

_GAP = r"[^\S\n]"
_CURRENCY = r"(?:\\?[$€£¥￥₹₩₽]|(?:US\$|USD|EUR|GBP|INR|Rs\.?))"
_TIMES = r"(?:[×xX*·⋅∙]|\\times|\\cdot)"
_SEPARATOR = r"(?:,\\!|\{,\}|\\[,!;: ]|[,'’\u00a0\u2007\u2009\u202f])"
# An ordinary space also parts two numbers, so it joins only "000", which nobody writes alone.
_WHOLE = rf"(?>[1-9][0-9]{{0,2}}(?:(?:{_SEPARATOR}[0-9]{{3}}(?![0-9]))++|(?:[ ]000(?![0-9]))++)|[0-9]++)"
_POINT_FIRST = r"(?<![\w.])\.[0-9]++"
_PLAIN = rf"(?>{_WHOLE}(?:\.[0-9]++)?|{_POINT_FIRST})"
_VULGAR = "[¼-¾⅐-⅞↉]"
_FRACTION = rf"(?:{_VULGAR}|\\[cdt]?frac\s?(?:\{{\s?-?\s?{_PLAIN}\s?\}}|[0-9])\s?(?:\{{\s?{_PLAIN}\s?\}}|[0-9]))"
_PART = re.compile(rf"(?<=\{{)[\s-]*{_PLAIN}|[0-9]")

_TOKEN = re.compile(
    rf"""
    (?=[0-9.\\¼-¾⅐-⅞↉])
    (?<![0-9^])(?<!\^\{{)(?<!\^-)(?<!\^\{{-)                # cm^2 and 10^{{-3}} hold no second number
    (?:
        (?P<slash>(?<=/)|(?<=/[ ]))?                        # 1/2/2025 is no fraction
        (?P<number>(?>(?P<whole>{_WHOLE})(?P<decimals>\.[0-9]++)?|{_POINT_FIRST}))
        (?:
            (?(decimals)(?!)|(?(whole)|(?!)))
            (?:{_GAP}and{_GAP}|{_GAP}|\\[,;:!\ ])?(?P<mixed>{_FRACTION}|[0-9]++/[0-9]++(?!/[0-9]))
            | (?(slash)(?!)){_GAP}?/{_GAP}?(?P<divisor>{_PLAIN})(?!{_GAP}?/{_GAP}?[0-9])
            | [eE](?P<exponent>[+-]?[0-9]++)
            | {_GAP}?{_TIMES}{_GAP}?10{_GAP}?
              (?:(?:\^|\*\*){_GAP}?(?P<brace>\{{)?{_GAP}?(?P<power>[+-]?[0-9]++)(?(brace){_GAP}?\}})
                 | (?P<raised>[⁺⁻]?[⁰¹²³⁴-⁹]++))
        )?
        | (?P<fraction>{_FRACTION})
    )
    """,
    re.VERBOSE,
)
_SIGN = re.compile(
    rf"(?:(?P<minus>-)(?P<gap>{_GAP}?)|(?<![\w-])negative{_GAP}|(?:(?<=is )|(?<=[=:] ))minus{_GAP})"
    rf"(?:{_CURRENCY}{_GAP}?)?\Z",
    re.IGNORECASE,
)
_BESIDE = re.compile(rf"{_GAP}*|:|[xX]")
_LINK = re.compile(
    r"[^\n.,;:?!(\[]{0,40}?(?P<operator>=|[-+/*×÷·⋅]|(?<![A-Za-z])[xX]|\\(?:times|cdot|div))(?:[\s$€£¥₹({*_-]|\\[A-Za-z]*+)*+"
)
_WORD = re.compile(r"[A-Za-z]{2,}")
_CLAUSE = re.compile(r"\b(?:and|so|since|as|because|if|where|when|or|but|for|of|in)\b", re.IGNORECASE)
_LONGEST_LINK = 60
_LONGEST_CALCULATION = 1000


def plain(text: str) -> str:
    """Write signs, digits and slashes of any script in ASCII, character for character."""
    if text.isascii():
        return text
    return _WIDE_GROUP.sub(",", text).translate(_ASCII)


def first(text: str, start: int, end: int) -> Figure | None:
    """Read the first number of a plain text, or what it is worked out to be where it opens a calculation.

    "5 of the 20" is 5, "5 + 3 = 8" is 8, and of numbers standing side by side ("3 5", "7:30") the last counts.
    """
    token = _TOKEN.search(text, start, end)
    return None if token is None else _figure(text, _worked_out(text, token, end))


def opening(text: str, start: int, end: int) -> Figure | None:
    """Read as `first` does, provided that a number stands at `start`."""
    return first(text, start, end) if _TOKEN.match(text, start, end) else None


def position(text: str, start: int, end: int) -> int | None:
    """Say where the first number of a plain text begins, its sign left out."""
    token = _TOKEN.search(text, start, end)
    return None if token is None else token.start()


def last(text: str) -> Figure | None:
    """Read the last number of a plain text."""
    tokens = deque(_TOKEN.finditer(text), maxlen=1)
    return _figure(text, tokens[0]) if tokens else None


def entire(text: str, start: int = 0) -> Number | None:
    """Read a plain text that is, from `start`, one number and nothing else but currency."""
    token = _TOKEN.search(text, start)
    if token is None:
        return None
    figure = _figure(text, token)
    around = text[start : figure.start] + text[figure.end :]
    return None if re.sub(_CURRENCY, "", around).strip() else figure.value


def _worked_out(text: str, token: re.Match[str], end: int) -> re.Match[str]:
    """Follow a calculation that opens with `token` to the number after its last equals sign."""
    newline = text.find("\n", token.end(), end)
    result, previous, beside = token, token, True
    line = _TOKEN.finditer(text, token.end(), end if newline < 0 else newline)
    for following in islice(line, _LONGEST_CALCULATION):
        if following.start() - previous.end() > _LONGEST_LINK:
            break
        between = text[previous.end() : following.start()]
        if _BESIDE.fullmatch(between):
            result = following if beside else result
        elif (operator := _operator(between)) is None:
            break
        else:
            beside = False
            result = following if operator == "=" else result
        previous = following
    return result


def _operator(between: str) -> str | None:
    """Find the operator that joins two numbers, units allowed before it ("15 gallons * 8 pints / gallon = 120")."""
    link = _LINK.fullmatch(between)
    if link is None or _CLAUSE.search(between) or len(_WORD.findall(between)) > 3:
        return None
    return link["operator"]


def _figure(text: str, token: re.Match[str]) -> Figure:
    value = _value(token)
    sign = _sign(text, token.start())
    if sign is None:
        return Figure(value=value, start=token.start(), end=token.end())
    if isinstance(value, Decimal):
        value = value.copy_negate()  # unary minus would round to the context's 28 digits
    elif value is not None:
        value = -value
    return Figure(value=value, start=sign, end=token.end())


def _sign(text: str, number: int) -> int | None:
    """Find the minus that belongs to the number at that position, not one that subtracts, joins or lists."""
    head = text[max(0, number - 24) : number]
    sign = _SIGN.search(head)
    if sign is None:
        return None
    at = number - len(head) + sign.start()
    if sign["minus"] is None:
        return at
    before = text[max(0, at - 4) : at].rpartition("\n")[2]
    operand = before.rstrip()
    if sign["gap"]:
        return at if operand.endswith(("=", "#", "{", "(", "[")) else None
    if operand == before:
        subtracts = operand[-1:].isalnum() or operand.endswith(("_", ")", "]", "}", "%", "°", "-"))
    else:
        subtracts = operand[-1:].isnumeric() or operand.endswith((")", "]", "}", "%"))
    return None if subtracts else at


def _value(token: re.Match[str]) -> Number | None:
    if token["fraction"] is not None:
        return _fraction(token["fraction"])
    if token["divisor"] is not None:
        return _ratio(token["number"], token["divisor"])
    return _scaled(token) if token["mixed"] is None else _mixed(token["whole"], token["mixed"])


def _scaled(token: re.Match[str]) -> Decimal | None:
    raised = token["raised"] and token["raised"].translate(_SUPERSCRIPTS)
    exponent = token["exponent"] or token["power"] or raised or "0"
    if len(exponent.lstrip("+-0")) > MAX_EXPONENT_DIGITS:
        return None
    return Decimal(f"{_digits(token['number'])}e{exponent}")


def _mixed(whole: str, written: str) -> Fraction | None:
    fraction = _fraction(written)
    # "3 10/2" is no mixed number but two side by side, of which the last counts.
    if fraction is None or fraction >= 1:
        return fraction
    return fraction + Fraction(_digits(whole)) if len(whole) <= MAX_FRACTION_DIGITS else None


def _fraction(written: str) -> Fraction | None:
    if "/" in written:
        top, bottom = written.split("/")
    elif len(written) == 1:
        top, bottom = unicodedata.normalize("NFKC", written).split("\u2044")
    else:
        top, bottom = _PART.findall(written)
    return _ratio(top, bottom)


def _ratio(top: str, bottom: str) -> Fraction | None:
    if len(top) + len(bottom) > MAX_FRACTION_DIGITS:
        return None
    divisor = Fraction(_digits(bottom))
    if not divisor:
        return None
    quotient = Fraction(_digits(top)) / divisor
    return -quotient if "-" in top else quotient


def _digits(written: str) -> str:
    return re.sub(r"[^0-9.]", "", written)
