"""Questions to the tokens a model reads: by the tokenizer's chat template if it has one, else a text template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from types import SimpleNamespace
from typing import Any, TypedDict
from unittest.mock import patch

from grpo_cli.support.errors import UserError, closest, explained
from grpo_cli.types import Prompt

Message = Mapping[str, Any]  # of a chat: a role and a content
Tokenizer = Any  # of Hugging Face, which has no type for all of them
Warn = Callable[[str], None]

PLACEHOLDER = "{question}"
_TURN, _SAID = "TURN-OF-THE-MODEL", "MESSAGE-{}-TO-IT"  # stand for texts in a template
MOST_TEXT = 10_000_000  # of one rendering
TODAY = datetime(2024, 7, 26)  # for templates that read the clock: the date that Llama 3.2's has without one


class PromptSettings(TypedDict):
    """The prompt settings of text tasks, explained in `conf/task/_prompt.yaml`."""

    system_prompt: str | None
    use_chat_template: bool
    template: str


class MadePrompts(Sequence[Prompt]):
    """`size` prompts, each made by `make(index)` on demand, so a million of them cost nothing."""

    def __init__(self, make: Callable[[int], Prompt], size: int) -> None:
        self._make, self._size = make, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        places = range(self._size)[index]
        return self._make(places) if isinstance(places, int) else [self._make(place) for place in places]

    def by_id(self, prompt_id: str) -> Prompt | None:
        """Return the prompt with an id that ends in its place, such as train-12; None if there is none."""
        number = prompt_id.rpartition("-")[2]
        found = self[int(number) % self._size] if number.isdecimal() else None
        return found if found and found.id == prompt_id else None


def encode_behind(tokenizer: Tokenizer, text: str, before: Sequence[int], special: bool = False) -> list[int]:
    """Return the tokens of a text behind others. SentencePiece and its kind begin a text with a space of their own, so
    the text is encoded behind a character that is taken off. With `special`, special tokens in it are no text."""

    def encoded(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=not special))

    alone = encoded(text)
    if not text or not before or encoded("\nx") == encoded("\n") + encoded("x"):
        return alone
    if before[-1] in tokenizer.added_tokens_decoder:
        mark = tokenizer.decode([before[-1]], skip_special_tokens=False)
        if tokenizer.encode(f"{mark}x", add_special_tokens=False)[1:] == encoded("x"):
            return alone  # it begins again behind special tokens
    for anchor in ("\n", ".", "a"):
        head, whole = encoded(anchor), encoded(anchor + text)
        if head and whole[: len(head)] == head:  # else they merge
            return whole[len(head) :]
    return alone


@dataclass(frozen=True)
class Prompting:
    """The way from questions to prompts, and from tokens to text.

    With a chat template the question alone is the user's message and `system_prompt` the system's. Without one, or with
    `use_chat_template=False` (base models often come with one that they were never trained on), the text is `template`
    with the question in its place, after `system_prompt` and an empty line. Braces in a question mean nothing.
    `examples`, questions with their answers, come before the question: as earlier turns, or each as a filled template
    and its answer, separated by empty lines. `tools` are JSON schemas for the chat template to describe to the model;
    `chat_template_kwargs` are variables of the template's own, such as Qwen3's `enable_thinking`.
    """

    tokenizer: Tokenizer
    template: str = PLACEHOLDER
    system_prompt: str | None = None
    use_chat_template: bool = False
    examples: tuple[tuple[str, str], ...] = ()
    tools: tuple[Any, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer, words: PromptSettings, values: Mapping[str, Any] | None) -> Prompting:
        """Build it from a task's settings and `model.chat_template_kwargs`, the values of a chat template's variables.
        Raise UserError for one that the template does not read."""
        made = cls(tokenizer, words["template"], words["system_prompt"], words["use_chat_template"])
        if not values or not made.is_chat:
            return made
        known = set(re.findall(r"[a-z_]\w*", str(tokenizer.chat_template)))
        for word in values.keys() - known:
            raise UserError(f"model.chat_template_kwargs.{word} is not read by the chat template{closest(word, known)}")
        return replace(made, chat_template_kwargs=values)

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.template:
            raise UserError(
                f"task.template={self.template!r} has no place for the question; write {PLACEHOLDER} where it belongs, "
                f'as in "Question: {PLACEHOLDER}\\nAnswer:"'
            )

    @property
    def is_chat(self) -> bool:
        return self.use_chat_template and bool(self.tokenizer.chat_template)

    @property
    def opens_thought(self) -> bool:
        """True if the chat template begins the model's turn with an open thought."""
        return self.is_chat and self.rendered([_message("user", "?")]).rstrip().endswith("<think>")

    def raw_text(self, token_ids: Sequence[int]) -> str:
        """Return the text with every special token, as records show it."""
        return str(
            self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return what judges and tools read: all but the token that ended it, since special tokens may be tags."""
        ended = len(token_ids) > 0 and token_ids[-1] in self._ends
        return self.raw_text(token_ids[:-1] if ended else token_ids)

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Special tokens that are no tags: those with a name, the template's end of a turn, and all like <|eom_id|>."""
        named = set(self.tokenizer.special_tokens_map.values())
        found = {
            token
            for token, added in self.tokenizer.added_tokens_decoder.items()
            if str(added) in named or (added.special and re.fullmatch(r"<[|｜][^/]+[|｜]>", str(added)))
        }
        end = turn_end(self.tokenizer)[1]
        return frozenset(found if end is None else found | {end})

    def encode(self, question: str, messages: Sequence[Message] = ()) -> tuple[int, ...]:
        """Return the prompt's tokens, all of them. `messages`, a chat that ends with the user, are used as given."""
        if messages and not self.is_chat:
            raise UserError("messages need a chat template: use a chat model, or give questions as text")
        if messages and (self.system_prompt or self.examples):
            raise UserError("messages are used as given: set task.system_prompt=null and task.few_shot=0")
        if self.is_chat:
            text = self.rendered(messages or self._chat(question))
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        shown = [self._filled(question).rstrip() + f" {answer}" for question, answer in self.examples]
        system = [self.system_prompt] if self.system_prompt else []
        ids = tuple(self.tokenizer("\n\n".join([*system, *shown, self._filled(question)]))["input_ids"])
        return ids[: len(ids) - self._behind]

    @cached_property
    def _behind(self) -> int:
        """The number of tokens that the tokenizer puts behind a text, such as EOS: a prompt continues."""
        whole, bare = self.tokenizer("x")["input_ids"], self.tokenizer.encode("x", add_special_tokens=False)
        ends = range(len(whole), len(bare) - 1, -1)
        return next((len(whole) - end for end in ends if whole[end - len(bare) : end] == bare), 0)

    def _filled(self, question: str) -> str:
        return self.template.replace(PLACEHOLDER, question)

    def _chat(self, question: str) -> list[Message]:
        turns = [_message("system", self.system_prompt)] if self.system_prompt else []
        for shown, answer in self.examples:
            turns += [_message("user", shown), _message("assistant", answer)]
        return [*turns, _message("user", question)]

    def between(self, turn: Sequence[int], messages: Sequence[str], role: str) -> tuple[int, ...]:
        """Return the tokens from the end of a model's turn, as it was sampled, to the beginning of its next one:
        messages of a `role`. Special tokens are the template's alone; those in a message are text."""
        if not self.is_chat:
            text = "".join("\n\n" + self._filled(message) for message in messages)
            return tuple(encode_behind(self.tokenizer, text, turn))
        *_, text = self._around(_TURN, role, len(messages))
        last = self.raw_text(turn[-1:]) if turn else ""
        # not the "<" of a turn that was cut, with which <|im_end|> begins
        is_end = last.isspace() or (bool(turn) and turn[-1] in self.tokenizer.added_tokens_decoder)
        lead, sampled, rest = text.partition(last) if is_end else ("", "", text)
        text = rest if sampled and not lead.strip() else text  # the turn has its end already
        ids, plain = list(turn), ""
        for i, message in enumerate(messages):
            before, _, text = text.partition(_SAID.format(i))
            plain += before
            if encode_behind(self.tokenizer, message, []) == encode_behind(self.tokenizer, message, [], special=True):
                plain += message
            else:  # it spells a special token
                ids += encode_behind(self.tokenizer, plain, ids, special=True)
                ids, plain = ids + encode_behind(self.tokenizer, message, ids), ""
        ids += encode_behind(self.tokenizer, plain + text, ids, special=True)
        return tuple(ids[len(turn) :])

    def check_turns(self, role: str, keep_reasoning: bool) -> None:
        """Raise UserError if the chat template cannot render an environment's message as `role`, or changes earlier
        turns of the model: training would see other text than the template renders."""
        if not self.is_chat:
            if self.tools:
                raise UserError("task.tools needs a chat template, which describes them to the model: use a chat model")
            return
        asked = [_message("user", "?")]
        if self.tools and self.rendered(asked) == replace(self, tools=()).rendered(asked):
            raise UserError("the chat template does not render tools: use a task.environment with respond(turn)")
        for turn in (_TURN, f"<think>\n{_TURN}\n</think>\n\n{_TURN}"):
            sampled, kept, _ = self._around(turn, role, 1)
            if kept.removeprefix(sampled).lstrip(" ") != turn and not keep_reasoning:
                raise UserError(
                    f"the chat template rewrites an earlier turn of the model: {(sampled + turn)[-90:]!r} becomes "
                    f"{kept[-90:]!r}. Train on turns as they were sampled: task.keep_reasoning=true"
                )

    def _around(self, turn: str, role: str, count: int) -> tuple[str, str, str]:
        """Return the template's text before a turn when it is sampled; the same with the turn, once it has been
        answered by `count` messages; and what comes after it."""
        asked = [_message("user", "?"), _message("assistant", turn)]
        text = self.rendered([*asked, *(_message(role, _SAID.format(i)) for i in range(count))])
        end = text.find(_SAID.format(0))
        at = text.rfind(_TURN, 0, max(end, 0)) + len(_TURN)
        if min(end, at - len(_TURN)) < 0:
            raise UserError(f"the tokenizer's chat template has no place for a {role} message after a reply")
        return self.rendered(asked[:1]), text[:at], text[at:]

    def rendered(self, messages: Sequence[Message]) -> str:
        """Return the text that the model reads before its reply."""
        end, header = self._opening
        return self.applied(messages, True).removesuffix(end) + header

    @cached_property
    def _opening(self) -> tuple[str, str]:
        """Return the template's faults: the EOS that it puts behind a prompt but not before a reply, and the
        header of the model's turn that it leaves out of prompts. Both are mostly empty."""
        asked = [_message("user", "?")]
        prompt = self.applied(asked, True)
        try:
            before, found, _ = self.applied([*asked, _message("assistant", _TURN)], False).partition(_TURN)
        except UserError:
            found = ""
        if not found:
            return "", ""
        eos = self.tokenizer.special_tokens_map.get("eos_token", "")
        end = eos if prompt.endswith(eos) and not before.startswith(prompt) else ""
        prompt, without = prompt.removesuffix(end), self.applied(asked, False).removesuffix(end)
        header = before[len(prompt) :].rstrip(" ") if prompt == without and before.startswith(prompt) else ""
        return end, header if header.strip() else ""

    def applied(self, messages: Sequence[Message], opened: bool) -> str:
        """Return the template's text, at the same moment for every run. Raise UserError for a template that fails, or
        makes too much text."""
        words = {**self.chat_template_kwargs, "tools": list(self.tools) or None}
        roles = " and a ".join(dict.fromkeys(message["role"] for message in messages))
        advice = "; try task.system_prompt=null, or task.use_chat_template=false for the plain task.template"
        # a template's clock is this module's: there is no other way to set it
        clock = patch("transformers.utils.chat_template_utils.datetime", SimpleNamespace(now=lambda: TODAY))
        with explained(f"the tokenizer's chat template refused a {roles} message", advice), clock:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=opened, tokenize=False, **words
            )
            if len(text.encode()) > MOST_TEXT:
                raise MemoryError("it makes too much text")
        return text


class TextTask:
    """A task whose prompts and completions are text."""

    _prompting: Prompting

    def prompts(self, split: str) -> Sequence[Prompt]:
        if split not in ("train", "eval"):
            raise UserError(f"the task has no split {split!r}; it has train and eval")
        return getattr(self, f"_{split}")

    def text(self, token_ids: Sequence[int]) -> str:
        return self._prompting.decode(token_ids)

    def raw_text(self, token_ids: Sequence[int]) -> str:
        return self._prompting.raw_text(token_ids)


def turn_end(tokenizer: Tokenizer) -> tuple[str, int | None]:
    """Return what the chat template writes behind a model's turn, and the special token in it that ends the turn; ""
    and None without a template, or with one that does not show it."""
    chat = Prompting(tokenizer, use_chat_template=True)
    try:
        *_, text = chat._around(_TURN, "user", 1) if chat.is_chat else ("",)
    except UserError:
        return "", None
    text = text.partition(_SAID.format(0))[0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text, next((token for token in ids if token in tokenizer.added_tokens_decoder), None)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
