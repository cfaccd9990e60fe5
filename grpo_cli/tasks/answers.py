"""Final answers of mathematics word problems: found in a text, read as exact fractions, compared exactly.

A text is looked at from its end, because what counts is what it finally says: the last `#### x`, `\\boxed{x}` or
`<answer>x</answer>` (the strict form), else the last "the answer is x" or "A: x", else the last number. Nothing is ever
evaluated, every pattern takes linear time, and what is read as a number is bounded in length; symbolic answers are not
understood.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER = 256  # characters after a marker in which its number must lie
MAX_DIGITS = 64  # longer runs of digits are not an answer to anything

_DASHES_AND_SPACES = str.maketrans(
    {"−": "-", "–": "-", "﹣": "-", "－": "-", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": ""}
)
_DIGIT_GAP = re.compile(r"(?<=[0-9])(?:[\u00a0\u2009\u202f]|\{,\}|\\[,!;: ])(?:\\!)?(?=[0-9]{3}(?![0-9]))")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s?(?:\{[^{}0-9]{0,80}\}|(?=\{))")
_LATEX_FRACTION = re.compile(
    r"\\[dtc]?frac\s?(?:\{\s?(-?[0-9][0-9,.]{0,63})\s?\}\s?\{\s?([0-9][0-9,.]{0,63})\s?\}|([0-9])([0-9]))"
)
_LATEX_ESCAPED = re.compile(r"\\([$%#&_])")
_LATEX_SPACE = re.compile(r"\\(?:[()\[\],;:! ]|(?:left|right|displaystyle|quad|qquad|approx)(?![a-z]))")

_RUN = r"(?:[0-9]|(?<![0-9A-Za-z_.)])\.[0-9])[0-9,.]*+"  # digits with what may stand between them: read by `_fraction`
_NUMBER = (
    r"(?:[$£€¥₹]\s?)?(?P<inner>-)?"
    r"(?:(?P<whole>[0-9]{1,4})[ ](?P<part>[0-9]{1,4})/(?P<per>[0-9]{1,4})(?![0-9/])"
    rf"|(?P<run>{_RUN})(?:[eE](?P<exponent>[+-]?[0-9]{{1,2}})(?![0-9]))?(?:\s?/\s?(?P<under>{_RUN}))?)"
)
# Anywhere in a text: not inside a word (`H2O`), and a minus between two things (`10-5`) is no sign.
_ANYWHERE = re.compile(rf"(?P<sign>(?<![0-9A-Za-z_)\]}}%$.])-)?(?<![0-9A-Za-z_]){_NUMBER}")
_LEADING = re.compile(rf"[\s*_`\"'(\[{{$£€¥₹:=~≈]*+(?P<sign>-\s?)?{_NUMBER}")
# What makes a number the beginning of an expression, a time, a range or a list instead of an answer.
_GOES_ON = re.compile(r"\s?(?:[+×÷·√π]|\^(?!\s?\{?\\circ)|\\(?!circ|degree)[a-z]|\*\*?[0-9]|[-/:*x]\s?[$(]?[0-9])")
_ANOTHER_NUMBER = re.compile(r"(?<![A-Za-z^0-9])[0-9]")
_BEGINS_WITH_NUMBER = re.compile(r"\W{0,12}[0-9]")
_STATED = re.compile(
    r"\banswer[*_]{0,2}\s?(?:is|equals|=|:)(?=\W{0,12}(?:[dtc]?frac\W{0,3})?[0-9])"
    r"|^[ \t*_]{0,4}(?P<a>(?-i:A))[*_]{0,2}:",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class Extracted:
    """The final answer of a text and the piece it was read from. `value` is None for none, and for no plain number.

    `strict` says that it was given in the form asked for, `#### x`, `\\boxed{x}` or in an answer tag.
    """

    value: Fraction | None
    text: str
    strict: bool


NOTHING = Extracted(None, "", False)


def extract_answer(text: str) -> Extracted:
    """The final answer of a completion: marked, else stated, else its last number.

    >>> extract_answer("He pays 3 * $6 = $18.\\n#### $18.00")
    Extracted(value=Fraction(18, 1), text='$18.00', strict=True)
    """
    return _marked(text) or _stated(text) or _last_number(text) or NOTHING


def gold_answer(text: str) -> Fraction | None:
    """The answer in a data set's answer field: marked, stated, or a field that is one number and at most a unit.

    Unlike a completion it is never guessed from a text with several numbers.
    """
    found = _marked(text) or _stated(text)
    return found.value if found else parse_number(text)


def parse_number(text: str) -> Fraction | None:
    """The number that `text` consists of, besides a currency, a percent sign (50% is 50) or a unit; else None.

    >>> parse_number("-$1,234.50 per day"), parse_number("1 1/2"), parse_number("3 or 4")
    (Fraction(-2469, 2), Fraction(3, 2), None)
    """
    found = _only(text)
    return found.value if found else None


def equal(a: Fraction | None, b: Fraction | None) -> bool:
    """Whether both are answers, and the same one. Exact: 0.33 is not 1/3."""
    return a is not None and a == b


def _marked(text: str) -> Extracted | None:
    """The last `#### x` or `\\boxed{x}`, whichever is later, or a later `<answer>x</answer>`.

    An answer such as `\\boxed{5\\pi}` is one, without a value; a heading `#### Step 2` or an empty box is none.
    """
    hashes, box = text.rfind("####"), text.rfind("\\boxed")
    tag = text.rfind("<answer>", max(hashes, box, 0))
    if tag >= 0 and (tagged := _only(text[tag + len("<answer>") :].partition("</answer>")[0], strict=True)):
        return tagged
    if hashes == box:  # both -1
        return None
    if box > hashes:
        start = box + len("\\boxed")
        given = braced(text[start : start + MAX_ANSWER].lstrip())
        found, is_answer = _only(given, strict=True), _ANOTHER_NUMBER.search(given)
    else:
        given = _line(text, hashes + 4)
        found, is_answer = _leading(given, strict=True), _BEGINS_WITH_NUMBER.match(given)
    return found or (Extracted(None, given.strip(), True) if is_answer else None)


def _stated(text: str) -> Extracted | None:
    """The last "the answer is x", or the last line "A: x" when x is all there is on it."""
    last = last_match(_STATED, text)
    if last is None:
        return None
    if last["a"]:
        return _only(_line(text, last.end()), max_words=3)
    return _leading(_window(text, last.end()).lstrip().partition("\n")[0])


def _last_number(text: str) -> Extracted | None:
    """The last number of the text. A run such as `1,2,3` that is no number is a list, and its end is meant."""
    last = last_match(_ANYWHERE, _plain(text))
    if last is None:
        return None
    value, shown = _value(last), last[0]
    if value is None and last["run"] and not last["under"]:
        shown = last["run"].rstrip(".,").rpartition(",")[2]
        value = _fraction(shown)
    return None if value is None else Extracted(value, shown.strip().rstrip(".,"), False)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last of all matches from the left."""
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def _window(text: str, start: int) -> str:
    """The next `MAX_ANSWER` characters, without a number that they cut short."""
    window = text[start : start + MAX_ANSWER]
    return window if len(text) <= start + MAX_ANSWER else window.rstrip("0123456789.,/")


def _line(text: str, start: int) -> str:
    return _window(text, start).partition("\n")[0]


def braced(window: str) -> str:
    """What is between the brace that the text begins with and the one that closes it; nothing if either is missing."""
    depth = 0
    for i, character in enumerate(window):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return window[1:i]
    return ""


def _plain(text: str) -> str:
    """The text with typographic signs, and what LaTeX writes around numbers, in their plain form."""
    text = _DIGIT_GAP.sub("", text)
    if not text.isascii():
        text = text.translate(_DASHES_AND_SPACES)
    if "\\" in text:
        text = _LATEX_FRACTION.sub(_plain_fraction, _LATEX_TEXT.sub("", text))
        text = _LATEX_SPACE.sub(" ", _LATEX_ESCAPED.sub(r"\1", text))
    return text


def _plain_fraction(match: re.Match[str]) -> str:
    """`\\frac{3}{4}` as `3/4`, and `1\\frac{3}{4}` as `1 3/4`."""
    upper, lower = match[1] or match[3], match[2] or match[4]
    mixed = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return f"{' ' if mixed else ''}{upper}/{lower}"


def _leading(text: str, strict: bool = False, max_words: int | None = None) -> Extracted | None:
    """The number that `text` begins with, else the one after its last equals sign (`3 * 4 = 12`); None where it begins
    an expression. With `max_words`, at most so many words, and no other number, may follow it."""
    text = _plain(text)
    for piece in (text, text.rpartition("=")[2]):
        match = _LEADING.match(piece)
        value = _value(match) if match else None
        if match is None or value is None or _GOES_ON.match(piece, match.end()):
            continue
        rest = piece[match.end() :]
        if max_words is None or not (_ANOTHER_NUMBER.search(rest) or len(rest.split()) > max_words):
            return Extracted(value, match[0].strip(" \t\n*_`\"'([{:=~≈").rstrip(".,"), strict)
    return None


def _only(text: str, strict: bool = False, max_words: int = MAX_ANSWER) -> Extracted | None:
    """As `_leading`, of a short text in which there is no other number."""
    return _leading(text, strict, max_words) if len(text) <= MAX_ANSWER else None


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of a match of `_ANYWHERE` or `_LEADING`; None for `1/0`, `3.5.2`, `12,34` and the like."""
    if match["whole"]:
        whole, part, per = int(match["whole"]), int(match["part"]), int(match["per"])
        size = whole + Fraction(part, per) if part < per else None
    else:
        size = _fraction(match["run"])
        if size is not None and match["exponent"]:
            size *= Fraction(10) ** int(match["exponent"])
        if size is not None and match["under"]:
            under = _fraction(match["under"])
            size = size / under if under else None
    negative = bool(match["sign"]) != bool(match["inner"])
    return -size if size is not None and negative else size


_DECIMAL = re.compile(r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]+)?")


def _fraction(run: str) -> Fraction | None:
    """`1,234.50` as a fraction; the full stop or comma of the sentence around it is not part of it."""
    run = run.rstrip(".,")
    if not run or len(run) > MAX_DIGITS or not _DECIMAL.fullmatch(run):
        return None
    return Fraction(run.replace(",", ""))
