"""From a question to the tokens a model reads: by the tokenizer's chat template if it has one, else a text template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Prompt, Rollout

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


class MadePrompts(Sequence[Prompt]):
    """`size` prompts, each made by `make(index)` when it is asked for: a million of them cost nothing."""

    def __init__(self, make: Callable[[int], Prompt], size: int) -> None:
        self._make, self._size = make, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        places = range(self._size)[index]
        return self._make(places) if isinstance(places, int) else [self._make(place) for place in places]


@dataclass(frozen=True)
class Verbatim:
    """Prompts and completions as they are, for a model that was trained on nothing else."""

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
    and its answer, with empty lines between. `tools` are JSON schemas that the chat template tells the model of.
    """

    tokenizer: Tokenizer
    template: str
    system_prompt: str | None
    use_chat_template: bool
    examples: tuple[tuple[str, str], ...] = ()
    tools: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.template:
            raise UserError(
                f"task.template={self.template!r} has no place for the question; write {PLACEHOLDER} where it belongs, "
                f'as in "Question: {PLACEHOLDER}\\nAnswer:"'
            )

    @property
    def is_chat(self) -> bool:
        return self.use_chat_template and bool(self.tokenizer.chat_template)

    def encode(self, question: str) -> tuple[int, ...]:
        """The prompt's tokens, never cut."""
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
        """UserError where the chat template has no place for what an environment says as `role`, or says earlier turns
        in other words than the model did: what is trained on would not be what the template makes of it."""
        if not self.is_chat:
            if self.tools:
                raise UserError("task.tools needs a chat template, which tells the model of them: take a chat model")
            return
        if self.tools and self._rendered([("user", "?")]) == replace(self, tools=())._rendered([("user", "?")]):
            raise UserError("the tokenizer's chat template tells of no tools: use task.respond, or another model")
        for turn in (_TURN, f"<think>\n{_TURN}\n</think>\n\n{_TURN}"):
            drawn, kept, _ = self._around(turn, role, 1)
            if kept != drawn + turn and not keep_reasoning:
                raise UserError(
                    f"the chat template changes what the model has said once it is answered: {(drawn + turn)[-90:]!r} "
                    f"becomes {kept[-90:]!r}. Take another model, or train on turns as they were drawn, reasoning "
                    "included: task.keep_reasoning=true"
                )

    def _around(self, turn: str, role: str, count: int) -> tuple[str, str, str]:
        """As the template has it: what comes before a turn when it is drawn; the same with the turn, once it has been
        answered by so many messages; and what comes after it."""
        asked, answers = [("user", "?"), ("assistant", turn)], [(role, _SAID.format(i)) for i in range(count)]
        text = self._rendered([*asked, *answers])
        end = text.find(_SAID.format(0))
        at = text.rfind(_TURN, 0, max(end, 0)) + len(_TURN)
        if min(end, at - len(_TURN)) < 0:
            raise UserError(f"the tokenizer's chat template has no place for a {role} message after a reply")
        return self._rendered(asked[:1]), text[:at], text[at:]

    def _encode_chat(self, question: str) -> list[int]:
        turns = [("system", self.system_prompt)] if self.system_prompt else []
        for shown, answer in self.examples:
            turns += [("user", shown), ("assistant", answer)]
        return self._rendered([*turns, ("user", question)], tokenize=True)

    def _rendered(self, turns: Sequence[tuple[str, str]], tokenize: bool = False) -> Any:
        """What the model reads before it speaks: text, or tokens."""
        from jinja2 import TemplateError  # comes with `transformers`' chat templates, and is slow to import

        messages = [{"role": role, "content": content} for role, content in turns]
        words: dict[str, Any] = {"tools": list(self.tools)} if self.tools else {}
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, tokenize=tokenize, **words
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template refuses with TemplateError; one that is wrong raises what its expressions raise.
            roles = " and a ".join(dict.fromkeys(message["role"] for message in messages))
            raise UserError(
                f"the tokenizer's chat template refused a {roles} message: {error}; "
                "try task.system_prompt=null, or task.use_chat_template=false for the plain task.template"
            ) from error
