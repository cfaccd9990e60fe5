"""Final answers that are LaTeX expressions: found in a text, brought to one way of writing, compared as that.

Most right answers are settled here, exactly and at once; only what is left needs a library that knows algebra. Every
pattern takes linear time, nothing is evaluated, and what is longer than `MAX_EXPRESSION` characters is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from grpo_cli.tasks.answers import braced, extract_answer, last_match

MAX_EXPRESSION = 512
_TAIL = 2048  # characters from the end in which an answer that is not marked is looked for

_BOX = re.compile(r"\\(?:boxed|fbox)\s?(?=[{0-9A-Za-z])")
_STATED = re.compile(r"\banswer[*_]{0,2}\s?(?:is|equals|=|:)[*_]{0,2}\s?", re.IGNORECASE)
_INLINE = re.compile(r"\$\$?([^$]+)\$|\\\(((?:[^\\]|\\[^)])+)\\\)|\\\[((?:[^\\]|\\[^\]])+)\\\]")


@dataclass(frozen=True)
class Found:
    """What a text finally says, as it was written; `marked` says that it was given in a form that is asked for."""

    expression: str
    marked: bool


def final_expression(text: str) -> Found | None:
    """The last `\\boxed{x}` or `<answer>x</answer>` (whichever is later), else the last line `#### x` (all marked);
    else what follows the last "answer is", else the last formula between dollars, else the last number.

    >>> final_expression(r"so $x=2$ and \\boxed{\\frac{1}{2}}.")
    Found(expression='\\\\frac{1}{2}', marked=True)
    """
    marked = boxed(text) or _after_hashes(text)
    if marked is not None:
        return Found(marked, True)
    tail = text[-_TAIL:]
    stated = _stated(tail) or _last_formula(tail) or extract_answer(tail).text
    return Found(stated, False) if _is_answer(stated) else None


def boxed(text: str) -> str | None:
    """What is in the last box or answer tag of a text, if that is an answer."""
    box = last_match(_BOX, text)
    found = _argument(text, box.end()) if box else ""
    opened = text.rfind("<answer>")
    if opened >= 0 and not (box and found and box.start() > opened):
        inside = text[opened + len("<answer>") :].partition("</answer>")[0].strip()
        found = inside.removeprefix("$").removesuffix("$") if _is_answer(inside) else found
    return found.strip() if _is_answer(found) else None


def _is_answer(text: str) -> bool:
    return 0 < len(text.strip()) <= MAX_EXPRESSION


def _argument(text: str, start: int) -> str:
    """LaTeX's argument at `start`: a group in braces without them, or one character; nothing if it does not close."""
    window = text[start : start + MAX_EXPRESSION + 2]
    return braced(window) if window.startswith("{") else window[:1]


def _after_hashes(text: str) -> str | None:
    start = text.rfind("####")
    line = text[start + 4 :].partition("\n")[0].strip() if start >= 0 else ""
    return line if _is_answer(line) else None


def _stated(tail: str) -> str:
    """What follows the last "answer is", to the end of its sentence; the formula alone if it begins with one."""
    last = last_match(_STATED, tail)
    if not last:
        return ""
    rest = tail[last.end() :]
    formula = _INLINE.match(rest)
    if formula:
        return _inside(formula)
    return re.split(r"\n|\.(?![0-9])", rest, maxsplit=1)[0].strip(" *_")


def _last_formula(tail: str) -> str:
    last = last_match(_INLINE, tail)
    return _inside(last) if last else ""


def _inside(match: re.Match[str]) -> str:
    return (match[1] or match[2] or match[3]).strip()


_TYPOGRAPHY = str.maketrans({"−": "-", "–": "-", "－": "-", "×": "*", "\u00a0": " ", "\u2009": " ", "\u202f": " "})
_LAYOUT = re.compile(
    r"\\(?:[,;:! ]|(?:left|right|displaystyle|textstyle|limits|quad|qquad|big|Big|bigg|Bigg)(?![A-Za-z]))|[$~]"
)
_DEGREES = re.compile(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])|°")
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|operatorname|mbox)\s?\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[0-9}])\s?\\(?:text|textrm|mathrm|mbox)\s?\{[^{}0-9]*\}(?:\^\{?[23]\}?)?\s*$")
_BARE = re.compile(r"\\(frac|sqrt)\s?(?=[0-9A-Za-z{])")
_EQUATION = re.compile(r"\s*[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?\s*=(?!.*=)")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+(?:\.[0-9]+)?")
_NUMBER = re.compile(r"-?(?:[0-9]{0,64}(?:\.[0-9]{1,64})?|[0-9]{1,64}/[0-9]{1,64})")
_FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9]{1,64})\}\{([0-9]{1,64})\}")


def normalised(expression: str) -> str:
    """One way of writing for what differs in layout alone: spaces, `\\left`, dollars, degrees, units, `x=`, `\\dfrac`.

    >>> normalised(r"x = \\dfrac 12"), normalised(r"5\\text{ cm}"), normalised("$1{,}000.$")
    ('\\\\frac{1}{2}', '5', '1000')
    """
    text = expression.translate(_TYPOGRAPHY).strip().rstrip(".")
    text = text.replace("\\$", "").replace("\\%", "").replace("%", "").replace("{,}", ",")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = _LAYOUT.sub("", text.replace("\\\\", "\n")).replace("\n", "\\\\")  # a row's end is no layout
    text = _DEGREES.sub("", text)
    text = _WORDS.sub(r"\1", _UNIT.sub("", text))
    equation = _EQUATION.match(text)
    if equation:
        text = text[equation.end() :]
    text = "".join(_braced_arguments(text).split()).rstrip(".")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _braced_arguments(text: str) -> str:
    """`\\frac12`, `\\frac{1}2` and `\\sqrt3` with all their arguments in braces."""
    pieces, position = [], 0
    for match in _BARE.finditer(text):
        if match.start() < position:  # inside an argument that has been copied
            continue
        pieces.append(text[position : match.start()] + f"\\{match[1]}")
        position = match.end()
        for _ in range(2 if match[1] == "frac" else 1):
            position += len(text[position:]) - len(text[position:].lstrip())
            if text.startswith("{", position) and (inside := _argument(text, position)):
                pieces.append(f"{{{inside}}}")
                position += len(inside) + 2
            elif text[position : position + 1].isalnum():
                pieces.append(f"{{{text[position]}}}")
                position += 1
    return "".join(pieces) + text[position:]


def number(text: str) -> Fraction | None:
    """The number that a normalised expression is: an integer, a decimal or a fraction of integers; else None."""
    if fraction := _FRACTION.fullmatch(text):
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}".removeprefix("--")
    try:
        return Fraction(text) if _NUMBER.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):  # no digits, or 1/0
        return None


def settled(gold: str, answer: str) -> bool | None:
    """Whether two expressions are equal, where their writing alone tells: the same, or two plain numbers; else None."""
    one, other = normalised(gold), normalised(answer)
    if one == other:
        return bool(one)
    values = number(one), number(other)
    return values[0] == values[1] if None not in values else None
