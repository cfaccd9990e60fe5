"""The tool calls in what a model wrote: Hermes' form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A call in a thought, `<think>...</think>`, is none. JSON is read whole, whatever tags are in its strings.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

_TAG = re.compile(r"</?think>|</?tool_call>")
_BEGIN, _CLOSE = re.compile(r"\s*"), re.compile(r"\s*</tool_call>")

Functions = Mapping[str, Callable[..., Any]]
Call = tuple[str, Callable[[], Any]]  # a name, and its function with the arguments


def calls_of(functions: Functions, turn: str, in_thought: bool) -> list[Call | str]:
    """Return the calls of a turn, or what is wrong with each. `in_thought`: the chat template has opened a thought."""
    found: list[Call | str] = []
    place = _behind(turn, "</think>", 0) if in_thought else 0
    while tag := _TAG.search(turn, place):
        place = tag.end()
        if tag[0] == "<think>":
            place = _behind(turn, "</think>", place)
        elif tag[0] == "</think>":  # all before it was a thought
            found.clear()
        elif tag[0] == "</tool_call>":
            found.append("the tool call has no beginning: open it with <tool_call>")
        else:
            call, place = _call(functions, turn, place)
            found.append(call)
    return found


def _behind(text: str, mark: str, start: int) -> int:
    place = text.find(mark, start)
    return len(text) if place < 0 else place + len(mark)


def _call(functions: Functions, turn: str, start: int) -> tuple[Call | str, int]:
    """Return the call that begins at a place, or what is wrong with it, and where it ends."""
    close = None
    try:
        begin = _BEGIN.match(turn, start)
        read, end = json.JSONDecoder().raw_decode(turn, begin.end() if begin else start)
        close = _CLOSE.match(turn, end)
    except (ValueError, RecursionError):
        pass
    if close is None:
        another = turn.find("<tool_call>", start)
        end = turn.rfind("</tool_call>", start, len(turn) if another < 0 else another)
        if end < 0:
            return "the tool call has no end: close it with </tool_call>", start
        return "the tool call is no JSON", end + len("</tool_call>")
    name, arguments = (read.get("name"), read.get("arguments", {})) if isinstance(read, dict) else (None, None)
    if not isinstance(name, str) or name not in functions:
        return f"the tool call names none of {', '.join(functions)}", close.end()
    if not isinstance(arguments, dict):
        return "the arguments of a tool call are an object", close.end()
    try:
        inspect.signature(functions[name]).bind(**arguments)
    except TypeError as error:
        return f"TypeError: {error}", close.end()
    return (name, partial(functions[name], **arguments)), close.end()
