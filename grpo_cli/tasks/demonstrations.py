"""Worked replies to imitate before reinforcement: solutions in a task's own rows, or conversations from a file.

A demonstration is a rollout that was not sampled: the replies are given, and all else (the prompt, what others say
between two replies) is only read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from grpo_cli.interfaces import KnowsSolutions, Runtime
from grpo_cli.settings import RunSettings, Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.problems import of_json, records, value_of, where
from grpo_cli.tasks.prompting import Prompting, Tokenizer, Warn, encode_behind, turn_end
from grpo_cli.types import ENVIRONMENT, GIVEN, Finish, Prompt, Request, Rollout, Span

Parts = Sequence[tuple[bool, Sequence[int]]]  # whether others say it, and its tokens


def demonstration(prompt: Prompt, parts: Parts) -> Rollout:
    """Build a rollout of these parts, with its replies marked as given."""
    tokens = tuple(token for _, said in parts for token in said)
    spans = tuple(Span(ENVIRONMENT if others else GIVEN, len(said)) for others, said in parts)
    request = Request(prompt, 0, 0, Sampling.plain(len(tokens)))
    return Rollout(request, tokens, (math.nan,) * len(tokens), Finish.EOS, spans)


def demonstrations(settings: RunSettings, runtime: Runtime, room: int, warn: Warn) -> tuple[Rollout, ...]:
    """Return what `train.warmup=sft` imitates, of at most `room` tokens. UserError where there is nothing."""
    train, tokenizer = settings.train, runtime.tokenizer
    chat = tokenizer.chat_template and (train.warmup_path or settings.parts["task"].get("use_chat_template"))
    usual = (turn_end(tokenizer)[1] if chat else None, tokenizer.eos_token_id, runtime.ends[0])
    eos = next(token for token in usual if token in runtime.ends)
    if train.warmup_path is None:
        most = train.warmup_steps * train.prompts * settings.m
        found = solutions(runtime.task, train.warmup_field, tokenizer, eos, warn, most)
    else:
        found = conversations(train.warmup_path, tokenizer, settings.model.chat_template_kwargs or {}, eos)
    shown = tuple(one for one in found if len(one.request.prompt.token_ids) + len(one) <= room)
    if len(shown) < len(found):
        warn(f"train.warmup=sft: {len(found) - len(shown)} of {len(found)} are left out, with more than {room} tokens")
    if not shown:
        raise UserError(f"train.warmup=sft: nothing is left to imitate that has at most {room} tokens")
    return shown


def solutions(task: Any, field: str, tokenizer: Tokenizer, eos: int, warn: Warn, most: int) -> list[Rollout]:
    """Return training problems with the text of a field of their rows as the reply; of a task that knows right replies,
    those to at most `most` problems. Raise UserError if there are none."""
    prompts, found = task.prompts("train"), []
    if isinstance(task, KnowsSolutions):
        if getattr(task, "turns", 1) > 1:
            raise UserError("train.warmup=sft: this task's solutions are of one turn, not of episodes; leave it out")
        some = [prompts[i] for i in range(min(len(prompts), most))]
        return [demonstration(one, [(False, [*task.solution(one), eos])]) for one in some]
    places: Sequence[int] = range(len(prompts) if hasattr(task, "row_of") else 0)
    if len(places) > most:  # no more are shown: each takes time and memory
        places = sorted(np.random.default_rng(0).permutation(len(places))[:most].tolist())
    for prompt in (prompts[place] for place in places):
        with suppress(KeyError):
            text = value_of(task.row_of(prompt), field)
            if isinstance(text, str) and text.strip():
                found.append(demonstration(prompt, [(False, [*reply_tokens(prompt, text, tokenizer), eos])]))
    if not found:
        raise UserError(
            f"train.warmup=sft imitates worked solutions, but no row of the task has text in the field {field}: set "
            "train.warmup_field, or give a file of conversations as train.warmup_path"
        )
    if len(found) < len(places):
        warn(f"train.warmup=sft: {len(found)} of {len(places)} problems have a solution in the field {field}")
    return found


def reply_tokens(prompt: Prompt, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text, which is not blank, as a reply begins with it. A space comes after a plain prompt
    that ends in a word or a colon, as the model would continue it."""
    last = prompt.token_ids[-1]
    end = tokenizer.decode([last])
    begins = last in tokenizer.all_special_ids or end[-1:].isspace() or end.endswith(">")
    return encode_behind(tokenizer, ("" if begins else " ") + text.strip(), prompt.token_ids)


def conversations(source: str, tokenizer: Tokenizer, words: Mapping[str, Any], eos: int) -> list[Rollout]:
    """Return all replies of rows with `messages`, as chat models are tuned on. `words` are for the chat template.
    Raise UserError for anything else, and for a template that changes a reply once it is answered."""
    chat = Prompting(tokenizer, use_chat_template=True, chat_template_kwargs=words)
    if not chat.is_chat:
        raise UserError("train.warmup_path needs a chat template: use a chat model, or the task's own solutions")
    found = []
    for number, row in records(source, "train.warmup_path"):
        place = where(source, number)
        messages = of_json(row.get("messages"), nulls=False) if isinstance(row, Mapping) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise UserError(f"{place} must have messages, a list of {{role, content}}, both text, without tool_calls")
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not replies or replies[0] == 0:
            raise UserError(f"{place} needs a reply, a message of the role assistant that comes after another one")
        try:
            first, *parts = _parts(messages, replies, chat, eos)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        found.append(demonstration(Prompt(f"warmup-{number:06d}", tuple(first[1]), ""), parts))
    if not found:
        raise UserError(f"train.warmup_path={source} is empty: it needs a JSON object with messages on each line")
    return found


def _is_message(message: Any) -> bool:
    is_text = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
    return is_text and not message.get("tool_calls")  # they are no part of the content, and would not be learnt


def _parts(
    messages: Sequence[Mapping[str, str]], replies: Sequence[int], chat: Prompting, eos: int
) -> Iterator[tuple[bool, list[int]]]:
    """Yield what others wrote and the replies, in turn; the first is the prompt."""
    before, ids, end = "", list[int](), chat.raw_text([eos])
    for i in replies:
        text = chat.rendered(messages[:i])
        if not text.startswith(before):
            raise UserError("the chat template changes a reply once it is answered; split it, one reply each")
        new = text[len(before) :]
        lead, ended, rest = new.partition(end) if before else ("", "", "")
        said = encode_behind(chat.tokenizer, rest if ended and not lead.strip() else new, ids, special=True)
        yield True, said
        reply = _spaced(messages[i]["content"], text, chat.applied(messages[: i + 1], opened=False), end)
        yield False, [*encode_behind(chat.tokenizer, reply, said), eos]
        before, ids = text + reply, [eos]


def _spaced(reply: str, prompt: str, answered: str, end: str) -> str:
    """Return the reply with the white space that a chat template leaves or puts around it.

    >>> _spaced("\\n4 ", "[INST] 2+2? [/INST]", "[INST] 2+2? [/INST] 4</s>", "</s>")
    ' 4'
    """
    said = answered.removeprefix(prompt)
    if said.rpartition(end)[0].strip() == reply.strip():
        return said.rpartition(end)[0]
    return next(filter(said.startswith, (reply, reply.lstrip(), reply.rstrip(), reply.strip())), reply)
