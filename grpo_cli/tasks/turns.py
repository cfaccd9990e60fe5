"""The observations of a model in an episode of several turns: by a class of one's own, or by functions as tools.

Each is a pure function of a row and of what the model has written so far, as text. Where an object of a class is
missing, a new one gets the earlier turns again, so none has to be stored. Calls of tools are data: nothing that a model
wrote is executed or ends a run, and the observation names the fault of a call or of the user's code.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Annotated, Any

from pydantic import Field

from grpo_cli.support.errors import UserError, explained, own_code, raised, text_of
from grpo_cli.support.ranges import Count
from grpo_cli.tasks.own_reward import own
from grpo_cli.tasks.problems import of_json
from grpo_cli.tasks.prompting import Prompting, PromptSettings, TextTask, Tokenizer, Warn
from grpo_cli.types import Prompt

MOST_CHARACTERS = 100_000  # of one message: a model's context is no longer
MOST_WAITING = 4096
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of an error, which has to be the same twice
_OBJECT = re.compile(r"<.* at 0x[0-9a-fA-F]+>")
_TAG, _CLOSE = re.compile(r"(</?think>|</?tool_call>)\s*"), re.compile(r"\s*</tool_call>")

Functions = Mapping[str, Callable[..., Any]]
Call = tuple[str, Callable[[], Any]]  # a name, and its function with the arguments


class TurnSettings(PromptSettings):
    """The prompt and turn settings of text tasks, explained in `conf/task/_turns.yaml`."""

    turns: Count
    environment: str | None
    tools: str | None
    respond_seconds: Annotated[float, Field(gt=0)]
    respond_workers: Count
    keep_reasoning: bool


@dataclass(frozen=True)
class Observation:
    """The messages that the model reads after a turn, None at the end of the episode. `failed` counts those that report
    an error; `faults` describe the errors of the user's code; `is_late`: a call has not returned in time."""

    messages: Sequence[str] | None
    failed: int = 0
    faults: tuple[str, ...] = ()
    is_late: bool = False


def environment_of(settings: TurnSettings, prompting: Prompting) -> Environment | None:
    """Build what the settings name, None with one turn. Raise UserError unless it is exactly one thing."""
    given = {key: str(settings[key]) for key in ("environment", "tools") if settings[key] is not None}
    if len(given) != (settings["turns"] > 1):
        raise UserError(
            f"task.turns={settings['turns']} has {' and '.join(given) or 'nothing'} to answer the model: give either "
            "task.environment or task.tools with 2 turns or more, and neither with 1"
        )
    if not given:
        return None
    ((key, value),) = given.items()
    arguments = (f"task.{key}={value}", settings["respond_seconds"], prompting.opens_thought)
    if key == "environment":
        return Episodes(own(value, "task.environment"), *arguments)
    module, _, names = value.partition(":")
    functions = [own(f"{module}:{word.strip()}", "task.tools") for word in names.split(",")]
    return Environment({getattr(function, "__name__", str(function)): function for function in functions}, *arguments)


class _Late(UserError):
    """A call of a user's code that has not returned in time."""


def _finish(call: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:  # raised again in the thread that waits
        done.set_exception(error)


class _Workers:
    """At most `count` threads that make calls in their order. Unlike an executor's they end with the program."""

    def __init__(self, count: int) -> None:
        self._calls, self._missing = SimpleQueue[tuple[Callable[[], Any], Future[Any]]](), count

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        self._calls.put((call, done))
        if self._missing:
            self._missing -= 1
            threading.Thread(target=self._work, daemon=True).start()
        return done

    def _work(self) -> None:
        while True:
            _finish(*self._calls.get())


def _with_timeout(call: Callable[[], Any], seconds: float, who: str) -> Any:
    """Return what a user's code returns, awaited. Raise UserError if it is late or would end the process."""
    done: Future[Any] = Future()
    threading.Thread(target=_finish, args=(call, done), daemon=True).start()  # it ends with the program
    if not wait([done], seconds).done:
        raise _Late(f"{who} has not returned within task.respond_seconds={seconds:g}: raise it, or see why it waits")
    if isinstance(error := done.exception(), KeyboardInterrupt | SystemExit):
        raise UserError(f"{who} {raised(error)}: let it return or raise an Exception") from error
    return done.result()


def _awaited(value: Any) -> Any:
    async def result() -> Any:
        return await value

    return asyncio.run(result()) if inspect.isawaitable(value) else value


def _cut(text: str) -> str:
    """Return the beginning of a text, without lone surrogates, which UTF-8 cannot hold."""
    return text[:MOST_CHARACTERS].encode("utf-8", "replace").decode()


def _observe(function: str, call: Callable[[], Any], seconds: float, who: str, ends: bool = False) -> Observation:
    """Return the text of a call's value, cut, or of its error: a model may have caused any. With `ends`, None is the
    end of the episode."""
    fault, is_late = "", False
    try:
        text = _with_timeout(lambda: _text(_awaited(call()), ends), seconds, f"{who} {function}")
    except _Late:
        is_late, text, fault = True, f"error: no answer in {seconds:g} seconds", f"took more than {seconds:g} seconds"
    except UserError:
        raise
    except BaseException as error:
        text, fault = _ADDRESS.sub("", f"error: {type(error).__name__}: {text_of(error)}"), raised(error)
    if text is None:
        return Observation(None)
    failed, message = int(bool(fault)), _cut(text)
    if message != text:
        fault = fault or f"returned more than {MOST_CHARACTERS} characters, or some that UTF-8 cannot hold: it was cut"
    return Observation([message], failed, (f"{function} {fault}",) if fault else (), is_late)


def _text(value: Any, ends: bool) -> str | None:
    text = str(value)
    if _OBJECT.fullmatch(text):  # a generator, say: it has no text, and is not the same twice
        raise TypeError(f"returned a {type(value).__name__}, which is no text")
    return None if ends and value is None else text


def calls_of(functions: Functions, turn: str, in_thought: bool) -> list[Call | str]:
    """Return the calls of a turn outside thoughts, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or what
    is wrong with each. JSON is read whole, whatever tags are in it. `in_thought`: the template has opened a thought."""
    found: list[Call | str] = []
    place = _behind_thought(turn, 0) if in_thought else 0
    while tag := _TAG.search(turn, place):
        place = tag.end()
        if tag[1] == "<think>":
            place = _behind_thought(turn, place)
        elif tag[1] == "</think>":  # all before it was a thought
            found.clear()
        elif tag[1] == "</tool_call>":
            found.append("the tool call has no beginning: open it with <tool_call>")
        else:
            call, place = _call(functions, turn, place)
            found.append(call)
    return found


def _behind_thought(text: str, start: int) -> int:
    end = text.find("</think>", start)
    return len(text) if end < 0 else end + len("</think>")


def _call(functions: Functions, turn: str, start: int) -> tuple[Call | str, int]:
    """Return the call that begins at a place, or what is wrong with it, and where it ends."""
    close = None
    with suppress(ValueError, RecursionError):
        read, end = json.JSONDecoder().raw_decode(turn, start)
        close = _CLOSE.match(turn, end)
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


class Environment:
    """Functions that the model may call: a source of observations, from a turn's text, the prompt and its row."""

    role = "tool"

    def __init__(self, functions: Functions, name: str, seconds: float, thinks: bool) -> None:
        from transformers.utils import get_json_schema

        self.name, self._seconds, self._thinks, self._functions = name, seconds, thinks, functions
        self.note: Callable[[Observation], None] = lambda found: None  # of the errors of a last turn
        advice = "; give each argument a type and a line under Args:"
        with explained(f"{name} cannot be described to the model", advice):
            self.tools = tuple(map(get_json_schema, functions.values()))

    def observe(self, prompt: Prompt, row: Mapping[str, Any], turns: Sequence[str], who: str) -> Observation:
        """Return what the model reads after the last turn; `who` names the request in errors."""
        return self._called(self._functions, turns[-1], who)

    def opens(self, row: Mapping[str, Any], place: str) -> str:
        """Return the text behind the question of a row."""
        return ""

    def _called(self, functions: Functions, turn: str, who: str) -> Observation:
        """Return the results of a turn's calls, one message each; no messages for a turn without a call."""
        found = [
            Observation([f"error: {call}"], failed=1) if isinstance(call, str) else _observe(*call, self._seconds, who)
            for call in calls_of(functions, turn, self._thinks)
        ]
        messages = [message for one in found for message in one.messages or ()]
        faults = tuple(fault for one in found for fault in one.faults)
        failed, is_late = sum(one.failed for one in found), any(one.is_late for one in found)
        return Observation(messages or None, failed, faults, is_late)


class Episodes(Environment):
    """Objects of a class as TRL takes it: `reset(**row)` and typed methods as tools, or `respond(turn)`, which returns
    what the model reads, or None. Each episode has an object of its own."""

    def __init__(self, made: Any, name: str, seconds: float, thinks: bool) -> None:
        if not isinstance(made, type) or not callable(getattr(made, "reset", None)):
            raise UserError(f"{name} must be a class with reset(**row), as TRL takes one; functions are task.tools")
        self._made, self._responds = made, callable(getattr(made, "respond", None))
        found = [word for word, _ in inspect.getmembers(made, callable) if not word.startswith("_")]
        no_tools = found if self._responds else ("reset", "get_reward", "close")
        self._methods = [word for word in found if word not in no_tools]
        if not self._responds and not self._methods:
            raise UserError(f"{name} has no method that answers: add typed methods as tools, or respond")
        with own_code(who := f"{name}, made without arguments,"):
            instance = _with_timeout(made, seconds, who)
        super().__init__({word: getattr(instance, word) for word in self._methods}, name, seconds, thinks)
        self.role, self.scores = "tool" if self._methods else "user", hasattr(made, "get_reward")
        # The newest objects that wait for a next turn, by the turns that they have had.
        self._waiting: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._lock, self._checked = threading.Lock(), False

    def observe(self, prompt: Prompt, row: Mapping[str, Any], turns: Sequence[str], who: str) -> Observation:
        with self._lock:
            instance = self._waiting.pop((prompt.id, tuple(turns[:-1])), None)
        if instance is None:
            instance = self._replayed(row, turns[:-1], who)
        found = self._observe_turn(instance, turns[-1], who)
        if found.is_late:  # its object may still be at work
            return found
        if not self._checked:
            again = self._observe_turn(self._replayed(row, turns[:-1], who), turns[-1], who)
            if again.messages != found.messages and not again.is_late:
                raise UserError(f"{self.name} answered the same turns in two ways: let randomness follow from the row")
            self._checked = not again.is_late
        if found.messages is not None:
            with self._lock:
                self._waiting[prompt.id, tuple(turns)] = instance
                if len(self._waiting) > MOST_WAITING:
                    del self._waiting[next(iter(self._waiting))]
        return found

    def score(self, row: Mapping[str, Any], turns: Sequence[str]) -> Any:
        """Return the reward of a whole episode. As in TRL the calls of its last turn are not made: the model reads no
        result of them."""
        who = f"{self.name}, get_reward for the row {str(row)[:80]},"
        instance = self._replayed(row, turns[:-1], who)
        if turns and not self._methods:
            self.note(self._observe_turn(instance, turns[-1], who))
        return _with_timeout(lambda: _awaited(instance.get_reward()), self._seconds, who)

    def opens(self, row: Mapping[str, Any], place: str) -> str:
        who = f"{self.name}, reset for {place},"
        with own_code(who):
            text = self._reset(row, who)[1]
        if text is not None and (not isinstance(text, str) or text != _cut(text)):
            raise UserError(
                f"{who} returned a {type(text).__name__}: return None, or text behind the question, in UTF-8 and of up "
                f"to {MOST_CHARACTERS} characters"
            )
        return text or ""

    def _reset(self, row: Mapping[str, Any], who: str) -> tuple[Any, Any]:
        def begin() -> tuple[Any, Any]:
            instance = self._made()
            return instance, _awaited(instance.reset(**of_json(row)))  # a copy: it may change what it gets

        return _with_timeout(begin, self._seconds, who)

    def _observe_turn(self, instance: Any, turn: str, who: str) -> Observation:
        if self._responds:
            return _observe("respond", lambda: instance.respond(turn), self._seconds, who, ends=True)
        return self._called({word: getattr(instance, word) for word in self._methods}, turn, who)

    def _replayed(self, row: Mapping[str, Any], turns: Sequence[str], who: str) -> Any:
        """Return a new object that has had these turns."""
        instance = self._reset(row, who)[0]
        for turn in turns:
            self._observe_turn(instance, turn, who)
        return instance


class DialogueTask(TextTask, ABC):
    """A task of text that is a `Dialogue`: its environment reads and returns text, and this class converts tokens."""

    turns = 1
    turn_ends: Sequence[str] = ()
    _environment: Environment | None

    def _set_up(
        self, tokenizer: Tokenizer, settings: TurnSettings, chat_template_kwargs: Mapping[str, Any] | None, warn: Warn
    ) -> None:
        """Set the prompting and the environment. Raise UserError for a chat template that does not serve them."""
        prompting = Prompting.of(tokenizer, settings, chat_template_kwargs)
        self._environment = environment = environment_of(settings, prompting)
        self._prompting, self._warn, self._failed = prompting, warn, 0
        if environment is not None:
            self.turns, self._prompting = settings["turns"], replace(prompting, tools=environment.tools)
            self._prompting.check_turns(environment.role, settings["keep_reasoning"])
            self._responders, self._lock = _Workers(settings["respond_workers"]), threading.Lock()
            self._known_faults, environment.note = set[str](), self._note

    @abstractmethod
    def row_of(self, prompt: Prompt) -> Mapping[str, Any]:
        """Return the row of a problem, for its environment."""

    def _opening(self, row: Mapping[str, Any], place: str) -> str:
        """Return the environment's text behind the question of a row."""
        return self._environment.opens(row, place) if self._environment else ""

    def between(self, turns: Sequence[Sequence[int]], messages: Sequence[str]) -> Sequence[int]:
        assert self._environment is not None
        return self._prompting.between(turns[-1], messages, self._environment.role)

    def respond(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Future[Sequence[str] | None]:
        turn_texts, row, environment = [self.text(turn) for turn in turns], self.row_of(prompt), self._environment
        assert environment is not None
        who = f"{environment.name}, called after turn {len(turns)} of prompt {prompt.id},"

        def observed() -> Sequence[str] | None:
            with own_code(who):
                found = environment.observe(prompt, row, turn_texts, who)
                self._note(found)
            return found.messages

        return self._responders.start(observed)

    def take_metrics(self) -> Mapping[str, float]:
        """Return the metrics of environments since the last call."""
        if self._environment is None:
            return {}
        with self._lock:
            failed, self._failed = self._failed, 0
        return {"turns/errors": float(failed)}

    def _note(self, observation: Observation) -> None:
        assert self._environment is not None
        with self._lock:
            self._failed += observation.failed
            for fault in observation.faults:
                if (kind := fault.partition(":")[0]) not in self._known_faults:
                    self._known_faults.add(kind)
                    self._warn(f"{self._environment.name}: {fault}; turns/errors counts such observations")


def completed_future(messages: Sequence[str] | None) -> Future[Sequence[str] | None]:
    """Return the future of an observation that is there already."""
    done: Future[Sequence[str] | None] = Future()
    done.set_result(messages)
    return done
