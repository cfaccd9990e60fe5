"""From a question to the tokens a model reads: by the tokenizer's chat template if it has one, else a text template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Prompt, Rollout

PLACEHOLDER = "{question}"


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
    and its answer, with empty lines between.
    """

    tokenizer: Tokenizer
    template: str
    system_prompt: str | None
    use_chat_template: bool
    examples: tuple[tuple[str, str], ...] = ()

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

    def _encode_chat(self, question: str) -> list[int]:
        from jinja2 import TemplateError  # comes with `transformers`' chat templates, and is slow to import

        turns = [("system", self.system_prompt)] if self.system_prompt else []
        for shown, answer in self.examples:
            turns += [("user", shown), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in [*turns, ("user", question)]]
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template refuses with TemplateError; one that is wrong raises what its expressions raise.
            roles = " and a ".join(dict.fromkeys(message["role"] for message in messages))
            raise UserError(
                f"the tokenizer's chat template refused a {roles} message: {error}; "
                "try task.system_prompt=null, or task.use_chat_template=false for the plain task.template"
            ) from error
