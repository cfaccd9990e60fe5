"""Reward parts that look at a completion's form alone: thoughts and answer each between their tags.

The published runs weigh them in different ways (see conf/task/jsonl.yaml); each part lies between 0 and 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_WHOLE = re.compile(r"<think>\n.*\n</think>\n<answer>\n.*\n</answer>", re.DOTALL)
_TAG_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


def strict_format(text: str) -> float:
    """1 if the completion is the four tags in order, each on a line of its own, with text between the pairs; else 0.

    The format reward of open-r1.
    """
    return float(all(text.count(tag) == 1 for tag in TAGS) and _WHOLE.fullmatch(text) is not None)


_FROM_THOUGHT_TO_ANSWER = re.compile(r"</think>\s{0,8}<answer>")


def soft_format(text: str) -> float:
    """1 less a hundredth for each character outside `<think>...</think> <answer>...</answer>`, at least 0.

    0 for a completion without the four tags in that order. The scale of PODS' single-GPU runs.
    """
    start = text.find("<think>")
    middle = _FROM_THOUGHT_TO_ANSWER.search(text, start) if start >= 0 else None
    end = text.find("</answer>", middle.end()) if middle else -1
    inside = end + len("</answer>") - start
    return max(0.0, 1.0 - 0.01 * (len(text) - inside)) if end >= 0 else 0.0


def tag_count(text: str) -> float:
    """A quarter for each of the four tags that occurs exactly once."""
    return sum(text.count(tag) == 1 for tag in TAGS) / len(TAGS)


def tag_lines(text: str) -> float:
    """A quarter for each of the four tags that stands exactly once at the edge of its line, as open-r1 counts them."""
    return sum(text.count(tag) == 1 for tag in _TAG_LINES) / len(_TAG_LINES)


FORMATS: Mapping[str, Callable[[str], float]] = {
    "format": strict_format,
    "format_soft": soft_format,
    "tag_count": tag_count,
    "tag_lines": tag_lines,
}
