"""Ranges stand beside types: every setting refuses the nearest value beyond its range, by its key."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import hydra.utils
import made
import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from grpo_cli.config.choices import choices, parts_of, shipped
from grpo_cli.config.instantiate import _takes, make
from grpo_cli.config.read import read
from grpo_cli.support.errors import UserError


def beyond(hint: Any) -> Iterator[Any]:
    """Yield the nearest values that a type's ranges leave out, those of members of unions included."""
    for limit in getattr(hint, "__metadata__", ()):
        for end in limit.metadata if isinstance(limit, FieldInfo) else [limit]:
            match end:
                case Ge(ge=end):
                    yield end - 1
                case Gt(gt=end) | Lt(lt=end):
                    yield end
                case Le(le=end):
                    yield end + 1
                case AfterValidator():
                    yield "no such word"
    for member in typing.get_args(hint):
        yield from beyond(member)


def of_parts() -> Iterator[tuple[str, str, str, Any]]:
    """Yield the settings with a range of every part in `conf/`, once for choices of one class or function."""
    for group in sorted({*parts_of("train"), *parts_of("eval")}):
        of_target = {shipped(group, choice)["_target_"]: choice for choice in choices(group)}
        for target, choice in of_target.items():
            hints = _takes(hydra.utils.get_object(target))
            for name, value in shipped(group, choice).items():
                if not isinstance(value, list | Mapping):
                    yield from ((group, choice, name, wrong) for wrong in beyond(hints.get(name)))


@pytest.mark.parametrize(("group", "choice", "name", "value"), [*of_parts()])
def test_a_part_refuses_what_is_beyond_its_ranges(group: str, choice: str, name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{group}\.{name}=.* must be ") as error:
        make(group, shipped(group, choice) | {name: value}, {})
    assert len(error.value.problems) == 1


def test_settings_of_a_run_are_refused_beyond_their_ranges() -> None:
    groups = [part for part in vars(made.settings()).values() if dataclasses.is_dataclass(part)]
    tried = 0
    for part in groups:
        for name, hint in typing.get_type_hints(type(part), include_extras=True).items():
            for value in beyond(hint):
                with pytest.raises(UserError, match=rf"^group\.{name}=") as error:
                    read(type(part), dataclasses.asdict(part) | {name: value}, key="group")
                assert len(error.value.problems) == 1
                tried += 1
    assert tried > 40
