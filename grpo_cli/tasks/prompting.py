"""From a question to the tokens a model reads: by the tokenizer's chat template if it has one, else a text template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypedDict, runtime_checkable

from grpo_cli.support.errors import UserError, closest
from grpo_cli.types import Finish, Prompt, Rollout

Message = Mapping[str, Any]  # of a chat: a role and a content

PLACEHOLDER = "{question}"
_TURN, _SAID = "TURN-OF-THE-MODEL", "MESSAGE-{}-TO-IT"  # stand for texts in a template


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that a task uses."""

    chat_template: Any

    def __call__(self, text: str) -> Any: ...

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **kwargs: Any) -> Any: ...


class PromptSettings(TypedDict):
    """The prompt settings of text tasks, explained in `conf/task/_prompt.yaml`."""

    system_prompt: str | None
    use_chat_template: bool
    chat_template_kwargs: Mapping[str, Any]
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


@dataclass(frozen=True)
class Verbatim:
    """Prompts and completions without any template, for a model trained on bare text."""

    tokenizer: Tokenizer

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, special tokens left out."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def completion(self, rollout: Rollout) -> str | None:
        """The rollout's text without its end token; None if it did not end by itself.

        Only the last token is dropped: another special token inside an answer must spoil it.
        """
        if rollout.finish is not Finish.EOS:
            return None
        return self.tokenizer.decode(list(rollout.token_ids[:-1]), skip_special_tokens=False)


@dataclass(frozen=True)
class Prompting:
    """How questions become prompts.

    With a chat template the question alone is the user's message and `system_prompt` the system's. Without one, or with
    `use_chat_template=False` (base models often come with one that they were never trained on), the text is `template`
    with the question in its place, after `system_prompt` and an empty line. Braces in a question mean nothing.
    `examples`, questions with their answers, come before the question: as earlier turns, or each as a filled template
    and its answer, separated by empty lines. `tools` are JSON schemas for the chat template to describe to the model;
    `chat_template_kwargs` are variables of the template's own, such as Qwen3's `enable_thinking`.
    """

    tokenizer: Tokenizer
    template: str
    system_prompt: str | None
    use_chat_template: bool
    examples: tuple[tuple[str, str], ...] = ()
    tools: tuple[Any, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, words: PromptSettings, chat_defaults: Mapping[str, Any] | None, **more: Any
    ) -> Prompting:
        """Made from a task's settings. `chat_defaults` (`model.chat_template_kwargs`) apply where the template reads
        them and the task does not set them. UserError for a variable that the template does not read."""
        made = cls(tokenizer, words["template"], words["system_prompt"], words["use_chat_template"], **more)
        told = {**told_by_model(tokenizer, words, chat_defaults), **words["chat_template_kwargs"]}
        known = template_variables(tokenizer) if made.is_chat else []
        if not made.is_chat and told:
            raise UserError(
                f"task.chat_template_kwargs={told} needs a chat template, and there is none, or "
                "task.use_chat_template=false turns it off: leave it out"
            )
        for word in told:
            if word not in known:
                raise UserError(
                    f"task.chat_template_kwargs.{word}: the tokenizer's chat template does not read {word}; it reads "
                    f"{', '.join(known) or 'no variable of its own'}{closest(word, known)}"
                )
        return replace(made, chat_template_kwargs=told)

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.template:
            raise UserError(
                f"task.template={self.template!r} has no place for the question; write {PLACEHOLDER} where it belongs, "
                f'as in "Question: {PLACEHOLDER}\\nAnswer:"'
            )

    @property
    def is_chat(self) -> bool:
        return self.use_chat_template and bool(self.tokenizer.chat_template)

    def encode(self, question: str, messages: Sequence[Message] = ()) -> tuple[int, ...]:
        """The prompt's tokens, never truncated. `messages`, a chat that ends with the user, are used as given."""
        if messages:
            return tuple(self._encode_messages(messages))
        if self.is_chat:
            return tuple(self._encode_chat(question))
        shown = [self._filled(question).rstrip() + f" {answer}" for question, answer in self.examples]
        system = [self.system_prompt] if self.system_prompt else []
        text = "\n\n".join([*system, *shown, self._filled(question)])
        return tuple(self.tokenizer(text)["input_ids"])

    def _filled(self, question: str) -> str:
        return self.template.replace(PLACEHOLDER, question)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, special tokens left out."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def between(self, turn: Sequence[int], said: Sequence[str], role: str) -> tuple[int, ...]:
        """The tokens from the end of a model's turn, which is given as it was drawn, to the beginning of its next one:
        what was said in between, as `role`. Special tokens are the template's alone; those in a message are text."""
        if not self.is_chat:
            text = "".join("\n\n" + self._filled(message) for message in said)
            return tuple(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        *_, text = self._around(_TURN, role, len(said))
        ids: list[int] = []
        for i, message in enumerate(said):
            before, _, text = text.partition(_SAID.format(i))
            ids += self.tokenizer.encode(before, add_special_tokens=False)
            ids += self.tokenizer.encode(message, add_special_tokens=False, split_special_tokens=True)
        ids += self.tokenizer.encode(text, add_special_tokens=False)
        return tuple(ids[1:] if turn and ids[0] == turn[-1] else ids)

    def check_turns(self, role: str, keep_reasoning: bool) -> None:
        """UserError if the chat template cannot render an environment's message as `role`, or changes earlier turns of
        the model: training would see other text than the template renders."""
        if not self.is_chat:
            if self.tools:
                raise UserError("task.tools needs a chat template, which describes them to the model: use a chat model")
            return
        asked = [_message("user", "?")]
        if self.tools and self._rendered(asked) == replace(self, tools=())._rendered(asked):
            raise UserError("the tokenizer's chat template does not render tools: use task.respond, or another model")
        for turn in (_TURN, f"<think>\n{_TURN}\n</think>\n\n{_TURN}"):
            drawn, kept, _ = self._around(turn, role, 1)
            if kept != drawn + turn and not keep_reasoning:
                raise UserError(
                    f"the chat template rewrites a turn of the model once it is answered: "
                    f"{(drawn + turn)[-90:]!r} becomes {kept[-90:]!r}. Use another model, or train on turns as they "
                    "were drawn, with their reasoning (or its empty placeholder): task.keep_reasoning=true"
                )

    def _around(self, turn: str, role: str, count: int) -> tuple[str, str, str]:
        """As the template has it: what comes before a turn when it is drawn; the same with the turn, once it has been
        answered by so many messages; and what comes after it."""
        asked = [_message("user", "?"), _message("assistant", turn)]
        answers = [_message(role, _SAID.format(i)) for i in range(count)]
        text = self._rendered([*asked, *answers])
        end = text.find(_SAID.format(0))
        at = text.rfind(_TURN, 0, max(end, 0)) + len(_TURN)
        if min(end, at - len(_TURN)) < 0:
            raise UserError(f"the tokenizer's chat template has no place for a {role} message after a reply")
        return self._rendered(asked[:1]), text[:at], text[at:]

    def _encode_chat(self, question: str) -> list[int]:
        turns = [_message("system", self.system_prompt)] if self.system_prompt else []
        for shown, answer in self.examples:
            turns += [_message("user", shown), _message("assistant", answer)]
        return self._rendered([*turns, _message("user", question)], tokenize=True)

    def _encode_messages(self, messages: Sequence[Message]) -> list[int]:
        if not self.is_chat:
            raise UserError("messages need a chat template: use a chat model, or give questions as text")
        for key, given in (("system_prompt=null", self.system_prompt), ("few_shot=0", self.examples)):
            if given:
                raise UserError(f"messages are used as given, with nothing before them: set task.{key}")
        return self._rendered(messages, tokenize=True)

    def _rendered(self, messages: Sequence[Message], tokenize: bool = False) -> Any:
        """What the model reads before it speaks: text, or tokens."""
        from jinja2 import TemplateError  # comes with `transformers`' chat templates, and is slow to import

        words = {**self.chat_template_kwargs, **({"tools": list(self.tools)} if self.tools else {})}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False, tokenize=tokenize, **words
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template refuses with TemplateError; one that is wrong raises what its expressions raise.
            roles = " and a ".join(dict.fromkeys(message["role"] for message in messages))
            raise UserError(
                f"the tokenizer's chat template refused a {roles} message: {error}; "
                "try task.system_prompt=null, or task.use_chat_template=false for the plain task.template"
            ) from error


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def told_by_model(
    tokenizer: Tokenizer | None, words: Mapping[str, Any], chat_defaults: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """The model's `chat_template_kwargs` that apply to a task with these settings: those that the template reads and
    the task does not set."""
    if not (chat_defaults and words.get("use_chat_template") and tokenizer and tokenizer.chat_template):
        return {}
    left = chat_defaults.keys() & set(template_variables(tokenizer)) - words["chat_template_kwargs"].keys()
    return {word: value for word, value in chat_defaults.items() if word in left}


def template_variables(tokenizer: Tokenizer) -> list[str]:
    """The variables that the tokenizer's chat template reads and that a task may set, in alphabetical order."""
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes

    # `generation` is a tag of `transformers` alone, and names nothing.
    found = tokenizer.chat_template
    source = "\n".join(found.values() if isinstance(found, dict) else [found])
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", source))
    except TemplateSyntaxError:
        return []  # it is refused when it is first used, with its reason
    given = {*environment.globals, "messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
    # What a template sets itself is its own, unless it asks first whether it was given it.
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    tests = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asked = {node.name for node in tests if isinstance(node, nodes.Name)}
    read = meta.find_undeclared_variables(tree) - given - (own - asked)
    return sorted(word for word in read if not word.endswith("_token"))
