"""Ranges of settings, which stand beside their types and which pydantic checks (`config.read`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from grpo_cli.support.errors import closest
from grpo_cli.support.formatting import parse_bytes


def OneOf(words: Sequence[str]) -> AfterValidator:  # noqa: N802
    """Return a check that a text is one of these words, where they are known at run time only."""

    def check(value: str) -> str:
        if value not in words:
            listed = f"one of {', '.join(words)}{closest(value, words)}"
            raise PydanticCustomError("one_of", "{listed}", {"listed": listed})
        return value

    return AfterValidator(check)


def _readable(value: Any, *, least: int = 1) -> Any:
    if type(value) not in (int, str) or parse_bytes(value) < least:
        raise PydanticCustomError("one_of", "{listed}", {"listed": "a size such as 512MiB or 2GB"})
    return value


Bytes = Annotated[int | str, BeforeValidator(_readable)]
MiBs = Annotated[int | str, BeforeValidator(partial(_readable, least=2**20))]  # no number whose unit was forgotten
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
