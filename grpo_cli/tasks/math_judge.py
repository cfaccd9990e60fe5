"""Answers that are LaTeX expressions: brought to one way of writing and compared as that, then by `math-verify`.

Most comparisons end here, exactly and at once: every pattern takes linear time and nothing is evaluated. `math-verify`
uses sympy, whose arithmetic can take forever on a short text and cannot be interrupted from within, so it runs in a
process to kill. Running out of time is a zero that is counted (`over_limit`), as is a comparison that fails
(`incomparable`): a model wrote what caused it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from grpo_cli.support.extras import require
from grpo_cli.tasks.answers import FORMULA, MAX_ANSWER, final_answer, inside, quantity, with_ascii_digits
from grpo_cli.tasks.judges import Completion, Judge
from grpo_cli.tasks.workers import Workers

_REMEMBERED = 50_000  # comparisons, before all are forgotten: completions repeat within a step and between steps
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf)|operatorname|mbox)\s?\{([^{}]*)\}"
_WORDS = re.compile(_TEXT)
_UNIT = re.compile(rf"(?<=[^\s(,=])\s*(?:{_TEXT}|(?<=[0-9}}])\s+([A-Za-z. ]{{2,40}}))(\^\{{?[23]\}}?)?\s*$")
_DEGREES = re.compile(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])|°")
_SPACES = re.compile(r"(?:\\[,;: ]|\\q?quad(?![A-Za-z])|[~\s])+")
_LAYOUT = re.compile(r"\\(?:!|(?:left|right|displaystyle|textstyle|limits|[bB]igg?)(?![A-Za-z])|(?=[$%]))|\$")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_LOOSE = re.compile(r"(?<![0-9A-Za-z.]) | (?![0-9A-Za-z.])")
_MIXED = re.compile(r"(?<![0-9.])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9./])")
_FUNCTIONS = "sin|cos|tan|cot|csc|log|ln|exp|lim|max|min|gcd|lcm|mod|det|arcsin|arccos|arctan|sinh|cosh|tanh|pi|infty"
_PLAIN_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])")
_NAMED = re.compile(
    r"((?:[A-Za-z ]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|angle|triangle)(?![A-Za-z]))+"
    r"(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]+\}))?'*(?:\([A-Za-z]\))?|\([A-Za-z](?:,\s?[A-Za-z])+\))\s?=([^=]+)"
)
_VARIABLE = re.compile(r"\s*[A-Za-z](?:_.+)?\s*")
_FUNCTION = re.compile(r"[A-Za-z]+\(.+")
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z*]+\}|\\[A-Za-z]+|sqrt")
# What math-verify reads past: digits side by side, the base of a number, the colons of times and ratios.
_MISREAD = re.compile(r"(?<!_)[0-9] [0-9]|[0-9]_|[0-9]:[0-9]{2}(?![0-9])|:.*:|\\frac ?[0-9] ?[0-9]{2}")

_CHOICE = re.compile(r"^\(?([A-Z])\)$")
_BETWEEN = re.compile(r", and |, or | and | or |, ")
_NO_LIST = re.compile(r"[(\[]|\\pm")

# The size of a unit and its names, by what it measures; other nouns measure themselves.
_UNITS = {
    "length": "1 m meter metre, .01 cm centimeter centimetre, .001 mm millimeter millimetre, 1000 km kilometer "
    "kilometre, .0254 in inch inche, .3048 ft foot feet, .9144 yd yard, 1609.344 mi mile",
    "time": "1 s sec second, 60 min minute, 3600 h hr hour, 86400 day, 604800 week",
    "mass": "1 g gram, 1000 kg kilogram, .001 mg milligram, 28.349523125 oz ounce, 453.59237 lb pound",
    "volume": "1 l liter litre, .001 ml milliliter millilitre",
    "money": "1 dollar usd, .01 cent ¢",
    "angle": "1 degree deg",
    "percent": "1 % percent",
}
_MEASURES = {
    name: (kind, Fraction(size))
    for kind, units in _UNITS.items()
    for size, *names in (unit.split() for unit in units.split(","))
    for name in names
}
_SHORT = frozenset("am pm of in at to by an us per".split())
_POWERS = {"square": 2, "sq": 2, "squared": 2, "^2": 2, "cubic": 3, "cu": 3, "cubed": 3, "^3": 3}
Unit = tuple[Fraction, tuple[str, ...]]


def read_unit(words: str) -> Unit | None:
    """Return the size of a unit and what it measures; None for what is no unit.

    >>> read_unit("cm^2"), read_unit("red apples"), read_unit("x + y")
    ((Fraction(1, 10000), ('length 2',)), (Fraction(1, 1), ('red 1', 'apple 1')), None)
    """
    text = re.sub(r"[.{}'-]", "", words.lower()).replace("mph", "mile per hour").replace("/", " per ")
    tokens = re.findall(r"[a-z]+|\^?\S", text)
    size, kinds, sign, power = Fraction(1), [], 1, 1
    for token, after in zip(tokens, [*tokens[1:], ""], strict=False):
        if token in _POWERS:
            power = _POWERS[token]  # of what follows; what it follows has it already
        elif token == "per":
            sign = -1
        else:
            name = token if token in _MEASURES else token.removesuffix("s")
            if name not in _MEASURES and (len(token) < 3 and token not in _SHORT or token in _FUNCTIONS.split("|")):
                return None
            kind, scale = _MEASURES.get(name, (name, Fraction(1)))
            power = sign * (_POWERS[after] if after in ("squared", "cubed", "^2", "^3") else power)
            kinds.append(f"{kind} {power}")
            size, power = size * scale**power, 1
    return size, tuple(kinds)


@dataclass(frozen=True)
class Written:
    """The parts of an answer: whose value it is (`x =`), an expression, its number if it is one, and its unit."""

    name: str
    body: str
    value: Fraction | None
    unit: Unit


def read(expression: str) -> Written:
    """Return the parts of an answer, in one way of writing for what differs in layout alone.

    >>> read(r"x = \\dfrac 12").body, read(r"5\\text{ cm}").value, read("$1{,}000.$").body, read(r"\\pi r^ 2 ").body
    ('\\\\frac{1}{2}', Fraction(5, 1), '\\\\frac{1000}{1}', '\\\\pi r^2')
    """
    text = with_ascii_digits(expression).replace("~", " ").strip().rstrip(".").strip()
    if formula := FORMULA.fullmatch(text):
        text = inside(formula)
    text = _DEGREES.sub(r"\\text{ degrees }", text)
    named = _NAMED.fullmatch(_WORDS.sub(r" \1 ", text))
    if named:
        text = text[text.index("=") + 1 :].strip()
    name = named[1] if named else ""
    if (found := quantity(f" {text}", refuse_more_numbers=True)) and (unit := read_unit(found[1])):
        return Written(name, rf"\frac{{{found[0].numerator}}}{{{found[0].denominator}}}", found[0], unit)
    behind = _UNIT.search(text)
    unit = read_unit("".join(it or "" for it in behind.groups())) if behind else None
    return Written(name, _body(text[: behind.start()] if behind and unit else text), None, unit or (Fraction(1), ()))


def _body(text: str) -> str:
    text = _WORDS.sub(r" \1 ", re.sub(r"\\[dtc]frac", r"\\frac", text)).replace("**", "^").replace(r"\sqrt(", "sqrt(")
    text = _LAYOUT.sub("", _SPACES.sub(" ", text.replace("\\\\", "\0")))  # a row's end is no layout
    text = re.sub(r"\{,\}(?=[0-9]{3}(?![0-9]))", "", text).replace("{,}", ",")
    text = text if re.search(r"[(\[{]", text) else _THOUSANDS.sub("", text)
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text.replace("\0", "\\\\"))
    text = re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda it: it[0].lower() if _is_word(it[0].lower()) else it[0], text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _LOOSE.sub("", _LOOSE.sub("", text))).strip().rstrip(".")
    text = _CHOICE.sub(r"\1", text)
    return text.replace(",", ", ")  # what is left is no comma between the digits of a number


def words(body: str) -> list[str]:
    """Return what stands for itself in an expression instead of for a product of letters: words, rows of capitals."""
    letters = re.findall(r"[A-Za-z]{2,}", _COMMAND.sub(" ", body))
    return sorted(it.lower() for it in letters if it not in ("or", "and") and _is_word(it))


def _is_word(letters: str) -> bool:
    some = set(letters.lower())
    spoken = len(letters) > 2 and bool(some & set("aeiu")) and not some <= set("abcdxyz")
    return letters.isupper() or "o" in some or spoken


def compare_written(reference: str, answer: str) -> bool | tuple[str, str]:
    """True if two answers are equal where their writing tells; else the expressions to compare by algebra.

    They are equal by writing as quantities (a unit may be left out, cents are hundredths of dollars) and as texts, and
    different as quantities, by their units, by their words, and by digits that only look alike.
    """
    one, other = read(reference), read(answer)
    names = one.name.strip(), other.name.strip()
    if names[0] != names[1] and any(all(map(kind.fullmatch, names)) for kind in (_VARIABLE, _FUNCTION)):
        return False
    if one.value is not None and other.value is not None:
        return _same(one.value, one.unit, other.value, other.unit)
    if one.unit != other.unit and one.unit[1] and other.unit[1]:
        return False
    if one.body == other.body:
        return bool(one.body)
    # An equation is compared with another as a whole.
    pairs = ((one, other), (other, one))
    here, there = (f"{a.name}={a.body}" if a.name and "=" in b.body else a.body for a, b in pairs)
    if words(here) != words(there) or _MISREAD.search(here) or _MISREAD.search(there):
        return False
    lists = [sorted(_BETWEEN.split(it)) for it in (here, there)]
    if any(len(set(it)) < len(it) for it in lists) and not _NO_LIST.search(here + there):
        return lists[0] == lists[1]  # the set of 1, 1, 2 is that of 1, 2
    return here, there


def _same(value: Fraction, unit: Unit, other_value: Fraction, other_unit: Unit) -> bool:
    (size, kinds), (other_size, other_kinds) = unit, other_unit
    if kinds and other_kinds:
        return kinds == other_kinds and value * size == other_value * other_size
    if ("percent 1",) in (kinds, other_kinds):
        # 50% is 0.5, and the 50 that a question asks for; but hardly 0.5% is 0.5
        part, plain = (value, other_value) if kinds else (other_value, value)
        return part / 100 == plain or (part == plain and abs(part) > 1)
    return value == other_value


class MathJudge(Judge):
    """A judge with the parts `correct`, `correct_strict` (in the form asked for), `over_limit` and `incomparable`, each
    1 or 0. A comparison has at most `seconds`."""

    advice = f"put it into \\boxed{{}}, or let it be an expression of at most {MAX_ANSWER} characters"

    def __init__(self, main: str, seconds: float, workers: int) -> None:
        require("math_verify", "task.reward=math", "answers that are plain numbers need none: task.reward=numbers")
        self.main = main
        self._workers = Workers("math", workers, seconds)
        self._part_by_pair: dict[tuple[str, str], str] = {}

    def reference(self, text: str) -> str | None:
        """Return the last box of a worked solution, what follows its `####`, or the whole of a short text."""
        if "####" in text or "\\boxed" in text or "\\fbox" in text:
            found = final_answer(text)
            return found.text if found and found.mark else None
        return text.strip() if len(text.strip()) <= MAX_ANSWER else None

    def __call__(self, completions: Sequence[Completion]) -> list[dict[str, float]]:
        found = [final_answer(completion.reply) for completion in completions]
        pairs = [(one.reference, it.text) if it else None for one, it in zip(completions, found, strict=True)]
        self._compare({pair for pair in pairs if pair})
        judged = []
        for pair, it in zip(pairs, found, strict=True):
            part = self._part_by_pair[pair] if pair else ""
            parts = {name: float(part == name) for name in ("correct", "over_limit", "incomparable")}
            judged.append(parts | {"correct_strict": parts["correct"] if it and it.mark else 0.0})
        return judged

    def _compare(self, pairs: set[tuple[str, str]]) -> None:
        """Note which part each pair of a reference and an answer counts for, if any."""
        if len(self._part_by_pair) > _REMEMBERED:
            self._part_by_pair.clear()
        written = {pair: compare_written(*pair) for pair in pairs - self._part_by_pair.keys()}
        left = {pair: {"reference": it[0], "answer": it[1]} for pair, it in written.items() if not isinstance(it, bool)}
        results = dict(zip(left, self._workers.ask([*left.values()]), strict=True))
        for pair, outcome in written.items():
            result = results.get(pair, {"equal": outcome})
            failed = "over_limit" if "limit" in result else "incomparable"
            self._part_by_pair[pair] = ("correct" if result["equal"] else "") if "equal" in result else failed
