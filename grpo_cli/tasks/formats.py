"""Reward parts that look at a completion's form alone: thoughts and answer each between their tags, and its length.

The published runs weigh them in different ways (docs/cookbook.md); each part lies between 0 and 1, `overlong` between
-1 and 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated

from pydantic import Field

from grpo_cli.types import Rollout

OVERLONG = "overlong"
OverlongTokens = Annotated[int | None, Field(ge=1)]
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TAG_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_OPENED, _TURNED = "<think>\n", "\n</think>\n<answer>\n"
_CLOSED = re.compile(r"\n</answer>$", re.MULTILINE)
_FROM_THOUGHT_TO_ANSWER = re.compile(r"</think>\s{0,8}<answer>")


def strict_format(text: str) -> float:
    """Return 1 for a completion that begins with the four tags in order, each on a line of its own; else 0.

    The format reward of open-r1: more may follow the line of the last tag, and a tag may occur again.
    """
    turned = text.find(_TURNED, len(_OPENED)) if text.startswith(_OPENED) else -1
    return float(turned >= 0 and _CLOSED.search(text, turned + len(_TURNED)) is not None)


def soft_format(text: str) -> float:
    """Return 1 less a hundredth for each character outside `<think>...</think> <answer>...</answer>`, at least 0.

    0 for a completion without the four tags in that order. The scale of PODS' single-GPU runs.
    """
    start = text.find("<think>")
    middle = _FROM_THOUGHT_TO_ANSWER.search(text, start) if start >= 0 else None
    end = text.find("</answer>", middle.end()) if middle else -1
    inside = end + len("</answer>") - start
    return max(0.0, 1.0 - 0.01 * (len(text) - inside)) if end >= 0 else 0.0


def tag_count(text: str, tags: Sequence[str] = TAGS) -> float:
    """Return a quarter for each of the four tags that occurs exactly once."""
    return sum(text.count(tag) == 1 for tag in tags) / len(tags)


FORMATS: Mapping[str, Callable[[str], float]] = {
    "format": strict_format,
    "format_soft": soft_format,
    "tag_count": tag_count,
    "tag_lines": partial(tag_count, tags=TAG_LINES),
}


def overlong(rollout: Rollout, tokens: int | None) -> float:
    """Return 0 up to L - c tokens, from there down to -1 at L in a straight line (DAPO, arXiv 2503.14476, equation 13).

    L is `sampling.max_new_tokens`, and c is `tokens`, at most L; None: a fifth of L, as published (4,096 of 20,480). In
    an episode all tokens count that L bounds, those of the environment among them.
    """
    longest = rollout.request.sampling.max_new_tokens
    within = max(1, longest // 5) if tokens is None else tokens
    return min(0.0, (longest - within - len(rollout)) / within)
