"""Tries a model of an unknown family on a few tokens before it is trained, since no list of families is ever complete:
that it is causal, that it is its backbone and its head and nothing more (`model.anatomy`), that its cache gives what a
full pass gives, and whether that holds for a prompt padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_cli.engine.rounds import generate
from grpo_cli.model.anatomy import backbone, head, place_of, unwrapped
from grpo_cli.model.checks import vocabulary_of
from grpo_cli.support.errors import UserError

_LONG, _SHORT, _SAID = 9, 4, 3  # tokens of two prompts, and of what is said after each
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # of the range of the logits, by the weights


@torch.no_grad()
def pads_in_peace(model: Any, pad: int) -> bool:
    """Whether prompts may be padded on the left. UserError for a model that is not causal, or whose rollouts or updates
    would be those of another one."""
    name = type(unwrapped(model)).__name__
    tokens = [(pad + 1 + i) % vocabulary_of(model) for i in range(_LONG + _SAID)]
    try:
        whole = _logits(model, tokens)
        ours = head(model)(backbone(model)(input_ids=_row(model, tokens), use_cache=False).last_hidden_state[0])
        early = _logits(model, tokens[:_SHORT])
        drawn = _drawn_from(model, [tokens[:_LONG], tokens[_LONG - _SHORT : _LONG]], pad, tokens[_LONG:])
        of_short = _logits(model, tokens[_LONG - _SHORT :])
    except UserError:
        raise
    except Exception as error:  # of code that may be anybody's
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no reason given')}"
        raise UserError(f"engine=generate cannot run {name} ({reason}); choose another model") from error
    rounding = _ROUNDING[unwrapped(model).dtype]
    if not _same(early, whole[:_SHORT], rounding):
        raise UserError(
            f"{name} is not a causal model: what it says of a token depends on later ones, as in an encoder; "
            "choose a model that continues text"
        )
    if not _same(ours.float(), whole, rounding):
        raise UserError(
            f"{name} computes more than its backbone and head do, so that updates would be of another model; choose "
            "a model of another family"
        )
    if not _same(drawn[:, 0], whole[_LONG - 1 : -1], rounding):
        raise UserError(
            f"{name} gives other logits with its cache than in a full pass, so that rollouts would be drawn from "
            "another distribution than the policy's; choose a model of another family"
        )
    return _same(drawn[:, 1], of_short[_SHORT - 1 : -1], rounding)


def _row(model: Any, tokens: Sequence[int]) -> Tensor:
    return torch.tensor([tokens], device=place_of(model))


def _logits(model: Any, tokens: Sequence[int]) -> Tensor:
    logits: Tensor = unwrapped(model)(input_ids=_row(model, tokens), use_cache=False).logits[0]
    return logits.float()


def _drawn_from(model: Any, prompts: Sequence[Sequence[int]], pad: int, said: Sequence[int]) -> Tensor:
    """The logits [steps, rows, vocabulary] that `generate` draws from, if each row then says the same."""
    seen: list[Tensor] = []

    def draw(logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        return torch.full((len(logits),), said[len(seen) - 1], device=logits.device)

    generate(model, prompts, pad, len(said), draw, lambda: len(seen) == len(said))
    return torch.stack(seen)


def _same(found: Tensor, expected: Tensor, rounding: float) -> bool:
    return bool((found - expected).abs().max() <= rounding * (expected.max() - expected.min()))
