"""Shell completion. Does not import Hydra, so that it is immediate."""

from __future__ import annotations

from collections.abc import Sequence


def offered(command: str, words: Sequence[str], incomplete: str) -> list[str]:
    """Completions of the word being typed: `sam` to `sampler=full`, `sampler=in` to `sampler=infinite`.

    Bash splits words at `=`: then `incomplete` is what follows it, and `words` ends with the group (and `=`, once
    something follows). If only one group matches, its choices are offered, so that no shell ends the word at `=`.
    """
    from grpo_cli.config.choices import choices, groups_of

    groups = groups_of(command)
    before = [word for word in words if word != "="]
    if before and before[-1] in groups:
        return [choice for choice in choices(before[-1]) if choice.startswith(incomplete)]
    typed, equals, _ = incomplete.partition("=")
    begun = [group for group in groups if (group == typed if equals else group.startswith(typed))]
    if len(begun) == 1:
        return [word for choice in choices(begun[0]) if (word := f"{begun[0]}={choice}").startswith(incomplete)]
    return [f"{group}=" for group in begun]
