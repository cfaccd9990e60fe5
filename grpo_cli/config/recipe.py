"""What `auto` stands for in settings that are the model's or the task's to say: their `recipe` in `conf/` has it.

A typed value and that of a named experiment are no `auto`, and a resumed run has what it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_cli.config.auto import AUTO, begun
from grpo_cli.config.choices import shipped

# The group whose recipe says a setting, and by which word.
_SAID_BY = {
    "optim.lr": ("model", "lr"),
    "optim.weight_decay": ("model", "weight_decay"),
    "optim.max_grad_norm": ("model", "max_grad_norm"),
    "sampling.max_new_tokens": ("task", "max_new_tokens"),
    "eval.problems": ("task", "eval_problems"),
    "eval.every": ("task", "eval_every"),
}
_BASE = {"model": "hf", "task": "_text"}


def fill(values: dict[str, Any]) -> None:
    """Put numbers in the place of `auto` in a composed configuration, where there are any."""
    for key, (group, word) in _SAID_BY.items():
        below, _, name = key.partition(".")
        settings = values.get(below)
        if isinstance(settings, dict) and settings.get(name) == AUTO:
            before = begun(Path(str(values["run_dir"])), below) if values.get("resume") else {}
            settings[name] = before.get(name, _said(values.get(group), group, word, values.get("model")))


def _said(part: Any, group: str, word: str, model: Any) -> Any:
    """A part of one's own that brings no recipe has that of the file which the shipped ones are based on."""
    recipe, of_model = shipped(group, _BASE[group])["recipe"] | _recipe(part), _recipe(model)
    if word == "lr" and _adapted(model):
        word = "lora_lr"
    most = of_model.get(word)
    return recipe[word] if most is None else min(recipe[word], most)


def _recipe(part: Any) -> Mapping[str, Any]:
    found = part.get("recipe") if isinstance(part, dict) else None
    return found if isinstance(found, dict) else {}


def _adapted(model: Any) -> bool:
    lora = model.get("lora")
    return model.get("adapter") is not None or (isinstance(lora, dict) and lora.get("rank") not in (None, 0))
