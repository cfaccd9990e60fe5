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
_JSON, _JSON_BEGIN, _CLOSE = json.JSONDecoder(), re.compile(r"\S"), re.compile(r"\s*</tool_call>")

Call = tuple[str, Callable[[], Any]]  # a name, and its function with the arguments


def calls_of(functions: Mapping[str, Callable[..., Any]], turn: str, in_thought: bool) -> list[Call | str]:
    """Read the calls of a turn, or what is wrong with each. `in_thought`: the chat template has opened one."""
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


def _call(functions: Mapping[str, Callable[..., Any]], turn: str, start: int) -> tuple[Call | str, int]:
    """Read the call that begins at a place; returns also where it ends. Its JSON is read whole, whatever tags are in
    it."""
    try:
        begin = _JSON_BEGIN.search(turn, start)
        read, end = _JSON.raw_decode(turn, begin.start() if begin else start)
        close = _CLOSE.match(turn, end)
    except (ValueError, RecursionError):
        close = None
    if close is None:
        upto = turn.find("<tool_call>", start)
        end = turn.rfind("</tool_call>", start, len(turn) if upto < 0 else upto)
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
