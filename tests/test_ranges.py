"""Ranges that settings and parts declare beside their types: what each refuses, and that each is asked."""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import hydra.utils
import made
import pytest

from grpo_cli.config.choices import choices, parts_of, shipped
from grpo_cli.config.instantiate import make
from grpo_cli.config.read import read_kwargs
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import OneOf, Range

Limit = Range | OneOf


@pytest.mark.parametrize(
    ("limit", "inside", "outside", "words"),
    [
        (Range(1), (1, 1.5, 10**30), (0, -1, math.nan), "at least 1"),
        (Range(0, above=True), (1e-9,), (0, -1.0, math.nan), "more than 0"),
        (Range(high=3), (3, -math.inf), (3.1,), "at most 3"),
        (Range(0, 0.5), (0, 0.5), (-1e-9, 0.6), "from 0 to 0.5"),
        (Range(0, 1, above=True, below=True), (0.5,), (0, 1), "more than 0 and less than 1"),
        (OneOf(("kept", "group")), ("kept", None), ("keep", 1), "one of kept, group"),
    ],
    ids=str,
)
def test_a_value_has_to_be_in_its_range(limit: Limit, inside: Any, outside: Any, words: str) -> None:
    assert [limit.problem(value) for value in inside] == [""] * len(inside)
    assert all(limit.problem(value).startswith(f"must be {words}") for value in outside)
    assert Range(1).problem("text") == Range(1).problem(True) == "", "of other types others speak"


def test_members_of_unions_and_lists_have_their_ranges_and_messages_a_reason() -> None:
    def rule(
        sizes: tuple[Annotated[int, Range(2)], ...], most: Annotated[int, Range(3, because="so")] | None
    ) -> None: ...

    assert out_of_range(rule, {"sizes": [2, 3], "most": None}, "part") == []
    told = out_of_range(rule, {"sizes": [2, 1], "most": 2}, "part")
    assert told == ["part.sizes[1]=1 must be at least 2", "part.most=2 must be at least 3: so"]


def out_of_range(kind: Any, values: Mapping[str, Any], group: str) -> list[str]:
    """What is refused of the arguments of a class or a function."""
    problems: list[str] = []
    read_kwargs(kind, group, values, problems)
    return problems


def limits_in(kind: Any) -> Iterator[Limit]:
    """Those that a type declares, members of unions included."""
    for said in getattr(kind, "__metadata__", ()):
        if isinstance(said, Limit):
            yield said
    for member in typing.get_args(kind):
        yield from limits_in(member)


def beyond(limit: Limit) -> Iterator[Any]:
    """The nearest values that are out of range."""
    if isinstance(limit, OneOf):
        yield "no such word"
        return
    if limit.low > -math.inf:
        yield limit.low if limit.above else limit.low - 1
    if limit.high < math.inf:
        yield limit.high if limit.below else limit.high + 1


def declared(kind: Any, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each setting of `names` with a range, and every value just beyond it."""
    plain = inspect.isclass(kind) and not dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind.__init__ if plain else kind, include_extras=True)
    for name in names:
        if not isinstance(names[name], list | tuple | Mapping):
            yield from ((name, value) for limit in limits_in(hints.get(name)) for value in beyond(limit))


def of_parts() -> Iterator[tuple[str, str, str, Any]]:
    """The settings of every part that `conf/` has, once for choices that are of one class or function."""
    for group in sorted({*parts_of("train"), *parts_of("eval")}):
        of_target = {shipped(group, choice)["_target_"]: choice for choice in choices(group)}
        for target, choice in of_target.items():
            for name, value in declared(hydra.utils.get_object(target), shipped(group, choice)):
                yield group, choice, name, value


@pytest.mark.parametrize(("group", "choice", "name", "value"), [*of_parts()])
def test_a_part_refuses_what_is_beyond_its_ranges(group: str, choice: str, name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{group}\.{name}=.* must be ") as error:
        make(group, shipped(group, choice) | {name: value}, {})
    assert len(error.value.problems) == 1


def test_several_settings_of_a_part_are_refused_at_once() -> None:
    with pytest.raises(UserError) as error:
        made.loss(clip_low=1.1, clip_high=-0.1, kl_coef=-1.0, aggregation="mean")
    keys = [problem.partition("=")[0] for problem in error.value.problems]
    assert keys == ["loss.clip_low", "loss.clip_high", "loss.kl_coef", "loss.aggregation"]


def test_settings_of_a_run_are_in_their_ranges_and_refused_beyond() -> None:
    settings = made.settings()
    groups = {"": settings, **{name: part for name, part in vars(settings).items() if dataclasses.is_dataclass(part)}}
    for group, part in groups.items():
        for name, value in declared(type(part), vars(part)):
            (told,) = out_of_range(type(part), {name: value}, group or "run")
            assert told.startswith(f"{group or 'run'}.{name}=") and " must be " in told
