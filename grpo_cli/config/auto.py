"""Resolves `auto`, once, at the start of a command: `run.json` records numbers and words, which a resumed run keeps.

Numbers come from the `recipe` of the model or the task in `conf/`, precisions from the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from grpo_cli.config.choices import shipped
from grpo_cli.settings import EvalRunSettings, ModelSettings, RunSettings

AUTO = "auto"
# The part whose recipe has the number, and its key there.
_BY_RECIPE = {
    **{f"optim.{word}": ("model", word) for word in ("lr", "weight_decay", "max_grad_norm")},
    "sampling.max_new_tokens": ("task", "max_new_tokens"),
    **{f"eval.{word}": ("task", f"eval_{word}") for word in ("problems", "every")},
}
MAY_BE_AUTO = {"model.dtype", "model.autocast", "train.micro_batch_tokens", *_BY_RECIPE}
# A user's own part without a recipe uses that of the base file of the shipped ones.
_BASE = {"model": "hf", "task": "_text"}
Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)


def fill(values: dict[str, Any]) -> None:
    """Replace `auto` in a composed configuration with the numbers of the recipes."""
    for key, (part, word) in _BY_RECIPE.items():
        group, _, name = key.partition(".")
        if isinstance(values.get(group), dict) and values[group].get(name) == AUTO:
            values[group][name] = _of_the_recipe(values, part, word)


def _of_the_recipe(values: Mapping[str, Any], part: str, word: str) -> Any:
    """Return the part's value, capped by the model's. An episode has as many replies as turns."""
    recipe, of_model = shipped(part, _BASE[part])["recipe"] | _recipe(values.get(part)), _recipe(values.get("model"))
    lora = values["model"].get("lora")
    if word == "lr" and (values["model"].get("adapter") or (isinstance(lora, dict) and lora.get("rank"))):
        word = "lora_lr"
    turns = values["task"].get("turns", 1) if word == "max_new_tokens" else 1
    found, most = recipe[word] * turns if isinstance(turns, int) and turns > 1 else recipe[word], of_model.get(word)
    return found if most is None else min(found, most)


def _recipe(part: Any) -> Mapping[str, Any]:
    found = part.get("recipe") if isinstance(part, dict) else None
    return found if isinstance(found, dict) else {}


def decided(settings: Settings, fast: bool | None = None) -> Settings:
    """Return the settings with precisions decided. `fast`: True if the device is faster in bfloat16 than in float32;
    None: find out."""
    from grpo_cli.support.processor import fast_in_bfloat16  # loads torch

    fast = fast_in_bfloat16(settings.device) if fast is None else fast
    return replace(settings, model=decided_model(settings.model, fast))


def decided_model(model: ModelSettings, fast: bool) -> ModelSettings:
    """Return the model's settings with precisions. Frozen weights below adapters are stored in bfloat16 if computed in
    it, since they take no small steps that could be lost; all others are float32."""
    autocast: Any = ("bfloat16" if fast else "none") if model.autocast == AUTO else model.autocast
    kept: Any = "bfloat16" if model.adapted and autocast == "bfloat16" else "float32"
    return replace(model, autocast=autocast, dtype=kept if model.dtype == AUTO else model.dtype)
