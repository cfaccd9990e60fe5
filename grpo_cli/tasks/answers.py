"""The final answer of a text, and the number that it is, as an exact fraction.

A text is looked at from its end, because what counts is what it finally says: the last `#### x`, `\\boxed{x}` or
`<answer>x</answer>` (marked), else what follows the last "the answer is", else the last formula (only where expressions
are compared), else the last number. Nothing is ever evaluated, every pattern takes linear time, and what is read as a
number is bounded in length.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER = 512  # characters
MAX_DIGITS = 64  # longer runs of digits are not an answer to anything
MAX_BITS = 8192  # of what a power comes to
_MOST_MARKS = 16  # from the end, that are looked at
_TAIL = 2048  # characters from the end in which an answer that is not marked is looked for

_MARK = re.compile(r"####|<answer>|\\(?:boxed|fbox)\s?(?=[{0-9A-Za-z])")
_WORD = re.compile(r"[^\w\\]*(?:[AaI] )?(?:[A-Za-z][a-z]+(?:[ ,:']|$)|[A-Z]{4,}[ :])")  # a sentence or a heading begins
_STATED = re.compile(r"\banswer[*_]{0,2}\s?(?:(?:is|equals|=)\s?:?|:)[*_]{0,2}\s?", re.IGNORECASE)
# Dollars around a formula touch it, and no number follows; those of "$3 and $4" are money.
FORMULA = re.compile(
    r"\$\$?(?!\s)([^$]+)(?<![\s=+*/(-])\$\$?(?![0-9])|\\\(((?:[^\\]|\\[^)])+)\\\)|\\\[((?:[^\\]|\\[^\]])+)\\\]"
)


@dataclass(frozen=True)
class Answer:
    """The final answer of a text, with ASCII digits and signs, and its mark: `####`, `<answer>`, `\\boxed` or none."""

    text: str
    mark: str = ""


def final_answer(text: str) -> Answer | None:
    """Return the final answer of a text, a number or an expression.

    >>> final_answer(r"so $x=2$ and \\boxed{\\frac{1}{2}}.")
    Answer(text='\\\\frac{1}{2}', mark='\\\\boxed')
    """
    text = with_ascii_digits(text)
    if marked := _marked(text):
        return marked
    tail = text[-_TAIL:]
    formula = last_match(FORMULA, tail)
    found = (_stated(tail) or (inside(formula) if formula else "") or _last_number(text)[1]).strip()
    return Answer(found) if 0 < len(found) <= MAX_ANSWER else None


def final_number(text: str) -> tuple[Fraction | None, bool]:
    """Return the number that a completion finally gives, None for none, and whether it is marked.

    >>> final_number("He pays 3 * $6 = $18.\\n#### $18.00")
    (Fraction(18, 1), True)
    """
    text = with_ascii_digits(text)
    if marked := _marked(text):
        value = number(marked.text, refuse_more_numbers=marked.mark != "####")
        if value is not None or not _WORD.match(marked.text):
            return value, True
    value = number(_stated(text[-_TAIL:]), refuse_more_numbers=False)
    return _last_number(text)[0] if value is None else value, False


def reference_number(text: str) -> Fraction | None:
    """Return the number in a data set's answer field: marked, stated, or a field that is one number, besides a
    currency, a percent sign (50% is 50) or a unit. It is never guessed from a text with several numbers.

    >>> reference_number("-$1,234.50 per day"), reference_number("1 1/2"), reference_number("3 or 4")
    (Fraction(-2469, 2), Fraction(3, 2), None)
    """
    text = with_ascii_digits(text)
    if marked := _marked(text):
        return number(marked.text, refuse_more_numbers=marked.mark != "####")
    stated = number(_stated(text[-_TAIL:]), refuse_more_numbers=False)
    return number(text, refuse_more_numbers=True) if stated is None else stated


def _marked(text: str) -> Answer | None:
    """Return the last marked answer that is not empty; a line `#### Explanation` counts where there is no other."""
    heading = None
    for mark in reversed(deque(_MARK.finditer(text), maxlen=_MOST_MARKS)):
        rest = text[mark.end() : mark.end() + MAX_ANSWER + 2]
        if mark[0] == "####":
            found = rest.partition("\n")[0]
        elif mark[0] == "<answer>":
            found = rest.partition("</answer>")[0]
        else:
            found = braced(rest) if rest.startswith("{") else rest[:1]
        if found.strip() and len(found) <= MAX_ANSWER:
            answer = Answer(found.strip(), mark[0].strip())
            if mark[0] != "####" or not _WORD.match(answer.text):
                return answer
            heading = heading or answer
    return heading


def _stated(tail: str) -> str:
    """Return what follows the last "answer is" to the end of its sentence, or the formula that it begins with."""
    found = ""
    for stated in _STATED.finditer(tail):
        rest = tail[stated.end() :].lstrip(" \n*_")
        formula = FORMULA.match(rest)
        text = inside(formula) if formula else re.split(r"\n|\.(?![0-9\\])", rest, maxsplit=1)[0].strip(" *_")
        found = text if not found or re.search(r"[0-9]|\\", text) else found  # not "I hope this answer is clear"
    return found


def inside(formula: re.Match[str]) -> str:
    return (formula[1] or formula[2] or formula[3]).strip()


_SIGNS = str.maketrans("−–‒‐⁄∕÷×⋅·’", "----///***'", "\u00ad\u200b\u200c\u200d\u2060\ufeff")  # the last are not seen
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_SCRIPT = re.compile(r"([⁺⁻]?[⁰¹²³⁴-⁹]+)|([₀-₉]+)|(?:([0-9])\s?)?([¼-¾⅐-⅞↉])")
_DIGIT_GAP = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,!;: ])(?:\\!)?(?=[0-9]{3}(?![0-9]))")
_GROUPS = re.compile(r"(?<![0-9.,/_^{'])[1-9][0-9]{0,2}(?:(?: [0-9]{3})++|(?:_[0-9]{3})++|(?:'[0-9]{3})++)(?![0-9/_'])")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s?(?:\{([^{}0-9]{0,80})\}|(?=\{))")
_LATEX_FRACTION = re.compile(
    r"\\[dtc]?frac\s?(?:\{\s?(-?[0-9][0-9,.]{0,63})\s?\}\s?\{\s?([0-9][0-9,.]{0,63})\s?\}|([0-9])([0-9]))"
)
_REPEATED = re.compile(r"([0-9]{0,20})\.([0-9]{0,20})\\overline\s?\{([0-9]{1,20})\}")
_LATEX_ESCAPED = re.compile(r"\\([$%#&_])")
_LATEX_SPACE = re.compile(r"\\(?:[()\[\],;:! ]|(?:left|right|displaystyle|quad|qquad|approx)(?![a-z]))")
_LATEX_TIMES = re.compile(r"\\(?:times|cdot)(?![a-z])")

_SIZES = {"k": 10**3, "hundred": 100, "thousand": 10**3, "lakh": 10**5, "crore": 10**7, "dozen": 12}
_SIZES |= {name: 10**6 for name in ("m", "mn", "million")} | {name: 10**9 for name in ("b", "bn", "billion")}
_SIZES |= {name: 10**12 for name in ("t", "tn", "trillion")}
_WORDS_OF_SIZE = "|".join(name for name in _SIZES if len(name) > 2)
_MONEY = {"$": "dollar", "£": "gbp", "€": "euro", "¥": "yen", "₹": "rupee"}
_MONEY |= {"₱": "peso", "₩": "won", "₽": "ruble", "₫": "dong", "฿": "baht", "₦": "naira", "₪": "shekel"}
_RUN = r"(?:[0-9]|(?<![0-9A-Za-z_.)])\.[0-9])[0-9,.]*+"  # digits with what may stand between them: read by `_fraction`
_NUMBER = (
    rf"(?P<money>[{''.join(_MONEY)}]\s?)?(?P<inner>[-+])?"
    r"(?:(?P<whole>[0-9]{1,4})[ ](?P<part>[0-9]{1,4})/(?P<per>[0-9]{1,4})(?![0-9/])"
    rf"|(?P<run>{_RUN})(?:_(?P<in_base>\{{)?(?P<base>[0-9]{{1,2}})(?(in_base)\}})(?![0-9])"
    r"|(?:\^|\*\*)(?P<in_power>\{)?(?P<power>[+-]?[0-9]{1,3})(?(in_power)\})(?![0-9/]|\.[0-9])"
    r"|(?:[eE]|\s?[x*]\s?10(?:\^|\*\*)(?P<in_exponent>\{)?)(?P<exponent>[+-]?[0-9]{1,3})(?(in_exponent)\})"
    r"(?![0-9/]|\.[0-9]))?"
    rf"(?:\s?/\s?(?P<under>{_RUN}))?)"
    # 5M and $5m are millions, 5m are meters
    rf"(?P<size>(?:\s?(?i:{_WORDS_OF_SIZE})s?(?![A-Za-z]))+"
    r"|(?:\s?k|[KM]|bn|mn|tn|(?(money)[mbBtT]|(?!)))(?![A-Za-z0-9]))?"
)
# Anywhere in a text: not in a word (`H2O`), an index or a power; a minus between two things (`10-5`) is no sign.
_ANYWHERE = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z_)\]}%$.])-)?(?<![0-9A-Za-z_^√±])(?<!\^-)(?<![\^_]\{)(?<![\^_]\{-)(?<!sqrt\{)" + _NUMBER
)
# The first group is not possessive: Python 3.11.2 loses what such a group has tried (CPython issue 106052).
_LEADING = re.compile(
    r"(?:[\s*_`\"'(\[{:=~≈]|\$(?!\s?[.0-9+-]))*(?:(?:USD|EUR|GBP|INR|Rs\.?) |[A-Z]{1,3}(?=\$))?"
    rf"(?P<sign>[-+]\s?)?{_NUMBER}"
)
# What makes a number the beginning of an expression, a time, a range or a list instead of an answer.
_OPERATED = r"[)\]}]*\^(?!\s?\{?\\circ)|[eE][-+]?[0-9]|[box][0-9A-F]|[0-9A-Za-z]*_\{?[0-9]"
_GOES_ON = re.compile(
    rf"{_OPERATED}|\s?(?:[+√π±]|\\(?!circ|degree)[a-z]|\*\*?[0-9]|[-/:*x]\s?[$(]?[0-9])"
    r"|\s?-\s?[b-zB-HJ-Z](?![A-Za-z'])|[abeinqrvwxyzDEIOPQRSUXYZ](?![A-Za-z])"
    r"|['\"][0-9]|(?<![,.])\s{1,9}[0-9]|(?<=,)(?:\s[-$]?[0-9.]+,?)++\W*$"
    r"|(?:\s{1,2}[A-Za-z]{1,20}){1,3}\s{1,2}[-+*/x]\s{1,2}[$(]?[0-9]|%\sof\s\$?[0-9]"
    r"|,?\s(?:and|or|to)\s[-$]?[0-9]|\s(?:and (?:a|one|two|three)\s|squared|cubed|factorial|halves)"
    r"|\s(?:third|fourth|fifth|sixth|eighth|ninth|tenth|hundredth|thousandth)s\b"
)
_POWERED = re.compile(_OPERATED)
_DECIMAL = re.compile(r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]+)?")
_ANOTHER_NUMBER = re.compile(r"(?<![A-Za-z^_0-9])(?<![\^_]\{)[0-9]")
# Left of an equals sign, a name or a calculation is no part of the answer; `2x = 8` and `x + 1 = 8` are equations.
_LETTER = re.compile(r"(?<![A-Za-z])(?!(?<=[\s0-9])x\s?[$(]?[0-9])(?:[a-fi-kn-rt-z]|[A-Z])(?![A-Za-z])")
_WORKED = re.compile(r"(?<![_{0-9])(?<![A-Za-z]\()[0-9]|[-+*/^<>,]")


def number(text: str, *, refuse_more_numbers: bool) -> Fraction | None:
    """Return the number that a text begins with, else the one after its last equals sign (`3 * 4 = 12`); None where it
    begins an expression or, with `refuse_more_numbers`, where another number follows."""
    *working, last = text.split("=")
    equation = any(_LETTER.search(it) and _WORKED.search(it) for it in working)
    found = (quantity(it, refuse_more_numbers=refuse_more_numbers) for it in ((text,) if equation else (text, last)))
    return next((it[0] for it in found if it), None)


def quantity(text: str, *, refuse_more_numbers: bool) -> tuple[Fraction, str] | None:
    """Return the number that a text begins with and what stands behind it; None where it begins an expression or, with
    `refuse_more_numbers`, where another number follows.

    >>> [quantity(it, refuse_more_numbers=True) for it in ("$1{,}234.50", "3\\\\text{ p.m.}", "3x")]
    [(Fraction(2469, 2), 'dollar'), (Fraction(3, 1), 'p.m'), None]
    """
    text = _without_latex(text)
    match = _LEADING.match(text)
    value = _value(match) if match else None
    if match is None or value is None or _GOES_ON.match(text, match.end()):
        return None
    rest = text[match.end() :].strip(" .,")
    if refuse_more_numbers and (rest.startswith("!") or _ANOTHER_NUMBER.search(rest)):
        return None
    money = _MONEY.get((match["money"] or "").strip(), "")
    return value, rest if rest.lower().startswith(money) else f"{money} {rest}".strip()


def _last_number(text: str) -> tuple[Fraction | None, str]:
    """Return the last number of a text, and its text. The end of a run such as `1,2,3`, which is no number, counts."""
    last = last_match(_ANYWHERE, _without_latex(text))
    if last is None or _POWERED.match(last.string, last.end()):
        return None, ""
    value, shown = _value(last), last[0]
    if value is None and last["run"] and last[0].endswith(last["run"]):
        shown = last["run"].rstrip(".,").rpartition(",")[2]
        value = _fraction(shown)
    return value, "" if value is None else shown.strip().rstrip(".,")


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last of all matches from the left."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def braced(window: str) -> str:
    """Return what is between the brace that the text begins with and the one that closes it, if both are there."""
    depth = 0
    for i, character in enumerate(window):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return window[1:i]
    return ""


def with_ascii_digits(text: str) -> str:
    """Return the text with digits, signs, spaces, fractions and powers of other scripts as ASCII writes them.

    >>> with_ascii_digits("\u22121\u00bd \u00d7 10\u00b2")
    '-1 1/2 * 10^{2}'
    """
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", _SCRIPT.sub(_plain_script, text)).translate(_SIGNS)
    return _OTHER_DIGIT.sub(lambda it: str(unicodedata.decimal(it[0])), text)


def _plain_script(match: re.Match[str]) -> str:
    power, index, whole, fraction = (unicodedata.normalize("NFKC", it or "") for it in match.groups())
    return f"^{{{power}}}" if power else f"_{{{index}}}" if index else f"{whole} {fraction}" if whole else fraction


def _without_latex(text: str) -> str:
    """Return the text without what LaTeX writes around numbers, and with digits that are grouped joined."""
    text = _DIGIT_GAP.sub("", text)
    if "\\" in text:
        text = _LATEX_TEXT.sub(lambda match: f" {(match[1] or '').strip()} " if match.start() else "", text)
        text = _REPEATED.sub(_unrolled, text)
        text = _LATEX_TIMES.sub("*", _LATEX_FRACTION.sub(_plain_fraction, text))
        text = _LATEX_SPACE.sub(" ", _LATEX_ESCAPED.sub(r"\1", text))
    return _GROUPS.sub(lambda match: re.sub("[ _']", "", match[0]), text)


def _plain_fraction(match: re.Match[str]) -> str:
    """Return `\\frac{3}{4}` as `3/4`, and `1\\frac{3}{4}` as `1 3/4`."""
    upper, lower = match[1] or match[3], match[2] or match[4]
    mixed = match.start() > 0 and match.string[match.start() - 1].isdigit()
    end = " " if match.string[match.end() : match.end() + 1].isdigit() else ""
    return f"{' ' if mixed else ''}{upper}/{lower}{end}"


def _unrolled(match: re.Match[str]) -> str:
    """Return `0.1\\overline{6}` as `15/90`."""
    once, again = match[1] + match[2], match[3]
    return f"{int(once + again) - int(once or 0)}/{10 ** len(match[2]) * (10 ** len(again) - 1)}"


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the number of a match of `_ANYWHERE` or `_LEADING`; None for `1/0`, `3.5.2`, `12,34` and the like."""
    if match["whole"]:
        whole, part, per = int(match["whole"]), int(match["part"]), int(match["per"])
        value = whole + Fraction(part, per) if part < per else None
    else:
        value = _fraction(match["run"])
        under = _fraction(match["under"]) if match["under"] else Fraction(1)
        try:
            if value is None or not under:
                return None
            if match["base"]:
                value = Fraction(int(match["run"], int(match["base"]) or 1))
            value = value ** int(match["power"] or 1) * Fraction(10) ** int(match["exponent"] or 0) / under
        except (ValueError, ZeroDivisionError):  # a digit that the base does not have, 0 to a negative power
            return None
    for word in re.findall("[a-z]+", (match["size"] or "").lower()):
        value = value and value * _SIZES[word if word in _SIZES else word.removesuffix("s")]
    if value is None or max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        return None
    negative = (match["sign"] or "").startswith("-") != (match["inner"] == "-")
    return -value if negative else value


def _fraction(run: str) -> Fraction | None:
    """Return `1,234.50` as a fraction; the full stop or comma of the sentence around it is not part of it."""
    run = run.rstrip(".,")
    if not run or len(run) > MAX_DIGITS or not _DECIMAL.fullmatch(run):
        return None
    return Fraction(run.replace(",", ""))
