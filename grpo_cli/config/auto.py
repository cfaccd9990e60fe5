"""Resolves `auto`, once, at the start of a command: `run.json` records numbers and words, which a resumed run keeps.

Numbers come from the `recipe` of the model or the task in `conf/`, precisions from the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_cli.settings import ModelSettings, Settings
from grpo_cli.support.processor import fast_in_bfloat16

AUTO = "auto"
# The part whose recipe has the number, and its key there.
_BY_RECIPE = {
    **{f"optim.{word}": ("model", word) for word in ("lr", "weight_decay", "max_grad_norm")},
    "sampling.max_new_tokens": ("task", "max_new_tokens"),
    **{f"eval.{word}": ("task", f"eval_{word}") for word in ("problems", "every")},
}
OF_TASK = {key for key, (part, _) in _BY_RECIPE.items() if part == "task"}
MAY_BE_AUTO = {"model.dtype", "model.autocast", "train.micro_batch_tokens", *_BY_RECIPE}


def fill(values: dict[str, Any]) -> None:
    """Replace `auto` in a composed configuration with the numbers of the recipes; without one it is refused later."""
    adapted = _get(values, "model", "adapter") or _get(values, "model", "lora", "rank")
    for key, (part, word) in _BY_RECIPE.items():
        group, _, name = key.partition(".")
        if _get(values, group, name) == AUTO:
            word = "lora_lr" if adapted and word == "lr" else word
            found = _get(values, part, "recipe", word)
            if word == "max_new_tokens" and isinstance(turns := _get(values, "task", "turns"), int):
                found *= max(1, turns)  # an episode has as many replies
            numbers = [one for one in (found, _get(values, "model", "recipe", word)) if isinstance(one, int | float)]
            values[group][name] = min(numbers, default=AUTO)  # of the model at most


def _get(values: Any, *keys: str) -> Any:
    """Return a nested value; None if there is none."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def decided(settings: Settings, fast: bool | None = None) -> Settings:
    """Return the settings with precisions. `fast`: the device is faster in bfloat16 than in float32; None: find out."""
    fast = fast_in_bfloat16(settings.device) if fast is None else fast
    return replace(settings, model=decided_model(settings.model, fast))


def decided_model(model: ModelSettings, fast: bool) -> ModelSettings:
    """Return the model's settings with precisions. Frozen weights below adapters are stored in bfloat16 if computed in
    it, since they take no small steps that could be lost; all others are float32."""
    autocast: Any = ("bfloat16" if fast else "none") if model.autocast == AUTO else model.autocast
    kept: Any = "bfloat16" if model.adapted and autocast == "bfloat16" else "float32"
    return replace(model, autocast=autocast, dtype=kept if model.dtype == AUTO else model.dtype)
