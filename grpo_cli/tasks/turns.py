"""What answers a model in an episode of several turns: a class of one's own, or functions as tools.

Each is a pure function of a row and of what the model has said so far, as text. A class, which has a state, is made
anew and hears the earlier turns again wherever it is needed, so none is ever kept. Calls of tools are data: a name and
arguments for a function of the user's own. Nothing that a model wrote is executed.
"""

from __future__ import annotations

import inspect
import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from grpo_cli.support.errors import UserError, own_code, refuse
from grpo_cli.support.ranges import Count, Range
from grpo_cli.tasks.own_reward import OwnReward, own
from grpo_cli.tasks.prompting import Prompting, PromptSettings
from grpo_cli.types import Prompt

MOST_CHARACTERS = 100_000  # of one answer: a model's context is no longer
MOST_WAITING = 4096
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

# What an environment says to these turns about this prompt, of this row: messages, or None to end the episode. Code of
# a person's own may say anything: `_checked` looks at it.
Says = Callable[[Prompt, Mapping[str, Any], Sequence[str]], Any]


class TurnSettings(PromptSettings):
    """What the tasks of text say of prompts and turns; each word has its comment in `conf/task/_turns.yaml`."""

    turns: Count
    environment: str | None
    tools: str | None
    respond_seconds: Annotated[float, Range(0, above=True)]
    respond_workers: Count
    keep_reasoning: bool


@dataclass(frozen=True)
class Environment:
    """Who says what, as whom (`role` of the chat), and what the model is told of tools."""

    says: Says
    name: str
    role: str = "user"
    tools: tuple[Any, ...] = ()
    score: Callable[[Mapping[str, Any], Sequence[str]], Any] | None = None  # what it says a whole episode is worth
    opens: Callable[[Mapping[str, Any], str], str] = lambda row, place: ""  # what it adds to the question of a row


def environment_of(settings: TurnSettings) -> Environment | None:
    """Build what the settings name, None with one turn. UserError unless it is exactly one thing."""
    named = [key for key in ("environment", "tools") if settings[key] is not None]
    if settings["turns"] == 1:
        refuse([f"task.{key} needs task.turns of 2 or more: with one the model is not answered" for key in named])
        return None
    if len(named) != 1:
        raise UserError(
            f"task.turns={settings['turns']} needs one thing that answers the model, either task.environment or "
            f"task.tools, and {'both were' if named else 'none was'} given"
        )
    if settings["tools"] is not None:
        module, _, names = settings["tools"].partition(":")
        functions = [own(f"{module}:{name.strip()}", "task.tools") for name in names.split(",")]
        by_name = {function.__name__: function for function in functions}
        name = f"task.tools={settings['tools']}"
        return Environment(
            lambda prompt, row, turns: _called(by_name, turns[-1]), name, "tool", _schemas(by_name, name)
        )
    return _of_class(str(settings["environment"]))


def environment_judge(environment: Environment | None) -> OwnReward:
    """What a class says that an episode is worth, as a judge."""
    if environment is None or environment.score is None:
        raise UserError("task.reward=environment needs a task.environment with get_reward()")
    return OwnReward("environment", environment.score)


def _schemas(functions: Mapping[str, Callable[..., Any]], name: str) -> tuple[Any, ...]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    problems, schemas = [], []
    for function in functions.values():
        try:
            schemas.append(get_json_schema(function))
        except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
            problems.append(
                f"{name}: {function.__name__} cannot be described to the model: {error}; give each argument a type and "
                "a line under Args: of the docstring"
            )
    refuse(problems)
    return tuple(schemas)


def _called(functions: Mapping[str, Callable[..., Any]], turn: str) -> Sequence[str] | None:
    """What the calls of a turn (Hermes' form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`) return, one
    message each; a call that is none is answered by what is wrong with it. None for a turn without a call."""
    calls = _CALL.findall(turn)
    if not calls and "<tool_call>" in turn:
        return ["error: the tool call has no end: close it with </tool_call>"]
    return [_result(functions, call) for call in calls] or None


def _result(functions: Mapping[str, Callable[..., Any]], call: str) -> str:
    try:
        asked = json.loads(call)
    except (ValueError, RecursionError):
        return "error: the tool call is no JSON"
    if not isinstance(asked, dict) or asked.get("name") not in functions:
        return f"error: the tool call names none of {', '.join(functions)}"
    arguments = asked.get("arguments", {})
    if not isinstance(arguments, dict):
        return "error: the arguments of a tool call are an object"
    try:
        return str(functions[asked["name"]](**arguments))
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # what wrong arguments may end in
        return f"error: {type(error).__name__}: {error}"


def _of_class(name: str) -> Environment:
    """A class as TRL takes it: `reset(**row)`, typed methods as tools; or with `step(turn)`, as in skyrl-gym, or
    `respond(turn)`, which return what is said."""
    made = own(name, "task.environment")
    if not isinstance(made, type) or not callable(getattr(made, "reset", None)):
        raise UserError(
            f"task.environment={name} must be a class with reset(**row), as TRL takes one; functions are task.tools"
        )
    member = next((word for word in ("step", "respond") if callable(getattr(made, word, None))), None)
    kept = {"reset", "get_reward", "close", "step", "respond"}
    tools = [word for word, _ in inspect.getmembers(made, callable) if not word.startswith("_") and word not in kept]
    if not tools and member is None:
        raise UserError(f"task.environment={name} has no method that answers: add typed methods as tools, or respond")

    def hear(instance: Any, turn: str) -> Any:
        if member is None:
            return _called({word: getattr(instance, word) for word in tools}, turn)
        said = getattr(instance, member)(turn)
        if member == "step":
            over, said = said["done"], [message["content"] for message in said["observations"]]
            return None if over else said
        return None if said is None else [said]

    waiting: dict[tuple[str, tuple[str, ...]], Any] = {}  # that have heard these turns, as long as there is room
    checked = threading.Event()

    def replayed(row: Mapping[str, Any], turns: Sequence[str]) -> tuple[Any, Any]:
        instance = made()
        instance.reset(**row)
        return instance, [hear(instance, turn) for turn in turns][-1]

    def says(prompt: Prompt, row: Mapping[str, Any], turns: Sequence[str]) -> Any:
        instance = waiting.pop((prompt.id, tuple(turns[:-1])), None)
        if instance is None:
            instance, said = replayed(row, turns)
        else:
            said = hear(instance, turns[-1])
        if len(waiting) < MOST_WAITING:
            waiting[prompt.id, tuple(turns)] = instance
        if not checked.is_set() and replayed(row, turns)[1] != said:
            raise UserError(
                f"task.environment={name} answered the same turns in two ways: an episode that is taken up again has to"
                " come out the same, so let all that is random in it follow from the row"
            )
        checked.set()
        return said

    def score(row: Mapping[str, Any], turns: Sequence[str]) -> Any:
        return replayed(row, turns)[0].get_reward()

    scores = score if hasattr(made, "get_reward") else None
    found = Environment(says, f"task.environment={name}", score=scores, opens=partial(_opened, made, name))
    if member is None:
        schemas = _schemas({word: getattr(made(), word) for word in tools}, f"task.environment={name}")
        found = replace(found, role="tool", tools=schemas)
    return found


def _opened(made: Callable[[], Any], name: str, row: Mapping[str, Any], place: str) -> str:
    """What `reset` says of a row at a place."""
    with own_code(f"task.environment={name}, reset for {place},"):
        said = made().reset(**row)
    if not isinstance(said, str | None) or len(said or "") > MOST_CHARACTERS:
        raise UserError(
            f"task.environment={name}: reset returned a {type(said).__name__} for {place}: return text that goes "
            f"behind the question, of at most {MOST_CHARACTERS} characters, or None"
        )
    return said or ""


class Speaks(ABC):
    """A task of text that is a `Dialogue`: what its environment hears and says is text, and here are the tokens."""

    turns = 1
    turn_ends: Sequence[str] = ()
    _environment: Environment

    def _talk(self, environment: Environment | None, prompting: Prompting, settings: TurnSettings) -> None:
        if environment is None:
            return
        prompting.check_turns(environment.role, settings["keep_reasoning"])
        self.turns, self._environment, self._speaks_by = settings["turns"], environment, prompting
        self._seconds, self._room = settings["respond_seconds"], threading.BoundedSemaphore(settings["respond_workers"])

    @abstractmethod
    def row_of(self, prompt: Prompt) -> Mapping[str, Any]:
        """What an environment knows of a problem."""

    @abstractmethod
    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as text."""

    def between(self, turns: Sequence[Sequence[int]], said: Sequence[str]) -> Sequence[int]:
        return self._speaks_by.between(turns[-1], said, self._environment.role)

    def respond(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Future[Sequence[str] | None]:
        heard = [self.text(turn) for turn in turns]
        who = f"{self._environment.name}, asked after turn {len(turns)} of prompt {prompt.id},"
        pending = _Pending(self._seconds, who)
        call = partial(self._environment.says, prompt, self.row_of(prompt), heard)
        threading.Thread(target=pending.run, args=(call, self._room), daemon=True).start()
        return pending


def answer(said: Sequence[str] | None) -> Future[Sequence[str] | None]:
    """What was said at once."""
    done: Future[Sequence[str] | None] = Future()
    done.set_result(said)
    return done


class _Pending(Future[Sequence[str] | None]):
    """An answer that is waited for, by `done`, no longer than some seconds from when its call began."""

    _started: float | None = None

    def __init__(self, seconds: float, who: str) -> None:
        super().__init__()
        self._seconds, self._who = seconds, who

    def run(self, call: Callable[[], Any], room: threading.BoundedSemaphore) -> None:
        with room:
            self._started = time.monotonic()
            try:
                with own_code(self._who):
                    said = _checked(call(), self._who)
                self.set_result(said)
            except UserError as error:
                self.set_exception(error)
            except InvalidStateError:  # it came too late
                return

    def done(self) -> bool:
        if not super().done() and self._started is not None and time.monotonic() - self._started > self._seconds:
            with suppress(InvalidStateError):  # it came just now
                self.set_exception(
                    UserError(
                        f"{self._who} has not answered within task.respond_seconds={self._seconds:g}: raise it, or see "
                        "what it waits for"
                    )
                )
        return super().done()


def _checked(said: Any, who: str) -> Sequence[str] | None:
    if said is None:
        return None
    for message in said:
        if not isinstance(message, str) or not message:
            kind = "an empty string" if message == "" else f"a {type(message).__name__}"
            raise UserError(f"{who} returned {kind}: return the text that the model is to read, or None for the end")
        if len(message) > MOST_CHARACTERS:
            raise UserError(f"{who} returned {len(message)} characters, more than {MOST_CHARACTERS}: shorten them")
    return list(said)
