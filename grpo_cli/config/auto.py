"""Resolves `auto`: decided once at the start of a command, recorded in `run.json`, and kept by a resumed run on any
machine, since its bits depend on it.

Numbers come from the `recipe` of the model or the task in `conf/`, precisions from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from grpo_cli.config.choices import shipped
from grpo_cli.runs.record import read_record
from grpo_cli.settings import EvalRunSettings, ModelSettings, RunSettings
from grpo_cli.support.processor import fast_in_bfloat16

AUTO = "auto"
# The settings that may be `auto`, by group; for numbers, the part whose recipe has them, and the key there.
_BY_DEVICE = {"model": ("dtype", "autocast"), "train": ("micro_batch_tokens",)}
_BY_RECIPE = {
    "optim": {
        "lr": ("model", "lr"),
        "weight_decay": ("model", "weight_decay"),
        "max_grad_norm": ("model", "max_grad_norm"),
    },
    "sampling": {"max_new_tokens": ("task", "max_new_tokens")},
    "eval": {"problems": ("task", "eval_problems"), "every": ("task", "eval_every")},
}
_OPEN: Mapping[str, tuple[str, ...]] = {**_BY_DEVICE, **{group: tuple(keys) for group, keys in _BY_RECIPE.items()}}
# A user's own part without a recipe uses that of the base file of the shipped ones.
_BASE = {"model": "hf", "task": "_text"}
Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)


def as_decided(settings: RunSettings | EvalRunSettings) -> dict[str, dict[str, Any]]:
    """The values of the settings that may be `auto`, by group."""
    return {
        group: {key: getattr(found, key) for key in keys if hasattr(found, key)}
        for group, keys in _OPEN.items()
        if (found := getattr(settings, group, None)) is not None
    }


def as_begun(settings: RunSettings | EvalRunSettings, group: str) -> dict[str, Any]:
    """Those values as the resumed run recorded them; empty if no run is resumed, or if it had no `auto`."""
    return _begun(settings.run_dir, group) if isinstance(settings, RunSettings) and settings.resume else {}


def _begun(run_dir: str, group: str) -> dict[str, Any]:
    known = _written(run_dir, group) or {}
    return {key: value for key, value in known.items() if key in _OPEN[group] and value != AUTO}


def _written(run_dir: str, group: str) -> dict[str, Any] | None:
    """The group's settings as a run recorded them; None if there is no such run."""
    record = read_record(Path(run_dir))
    found = None if record is None else record.config.get(group)
    return found if isinstance(found, dict) else None


def fill(values: dict[str, Any]) -> None:
    """Replace `auto` in a composed configuration with the numbers of the recipes.

    A run that began before there was `model.chat_template_kwargs` goes on with the prompts that it had.
    """
    word = "chat_template_kwargs"
    if values.get("resume") and word not in (_written(str(values["run_dir"]), "model") or {word: None}):
        values["model"][word] = None
    for group, keys in _BY_RECIPE.items():
        settings = values[group] if isinstance(values.get(group), dict) else {}
        for name in [name for name in keys if settings.get(name) == AUTO]:
            begun = _begun(str(values["run_dir"]), group) if values.get("resume") else {}
            settings[name] = begun.get(name, _of_the_recipe(values, *keys[name]))


def _of_the_recipe(values: Mapping[str, Any], part: str, word: str) -> Any:
    """The part's value, capped by the model's. An episode has as many replies as turns."""
    recipe, of_model = shipped(part, _BASE[part])["recipe"] | _recipe(values.get(part)), _recipe(values.get("model"))
    if word == "lr" and _has_adapters(values["model"]):
        word = "lora_lr"
    turns = values["task"].get("turns", 1) if word == "max_new_tokens" else 1
    found = recipe[word] * turns if isinstance(turns, int) and turns > 1 else recipe[word]
    most = of_model.get(word)
    return found if most is None else min(found, most)


def _recipe(part: Any) -> Mapping[str, Any]:
    found = part.get("recipe") if isinstance(part, dict) else None
    return found if isinstance(found, dict) else {}


def _has_adapters(model: Any) -> bool:
    lora = model.get("lora")
    return model.get("adapter") is not None or (isinstance(lora, dict) and lora.get("rank") not in (None, 0))


def decided(settings: Settings, say: Callable[[str], None], fast: bool | None = None) -> Settings:
    """The settings with precisions decided. `say` gets the choice, and a warning if it is slow here.

    `fast`: whether the device is faster in bfloat16 than in float32; None: determine it from the settings' device.
    """
    fast = fast_in_bfloat16(settings.device) if fast is None else fast
    begun = as_begun(settings, "model")
    here = decided_model(settings.model, fast)
    changed = {key: word for key, word in begun.items() if getattr(settings.model, key) == AUTO}
    model = decided_model(replace(settings.model, **changed), fast)
    for line in _remarks(settings.model, here, model, fast):
        say(line)
    return replace(settings, model=model)


def decided_model(model: ModelSettings, fast: bool) -> ModelSettings:
    """Frozen weights below adapters are stored in bfloat16 if computed in it, since they take no small steps that could
    be lost; all others are float32."""
    autocast = ("bfloat16" if fast else "none") if model.autocast == AUTO else model.autocast
    half = model.adapted and autocast == "bfloat16"
    dtype = ("bfloat16" if half else "float32") if model.dtype == AUTO else model.dtype
    return replace(model, autocast=autocast, dtype=dtype)


def _remarks(asked: ModelSettings, here: ModelSettings, model: ModelSettings, fast: bool) -> Iterator[str]:
    faster, slower = ("bfloat16", "float32") if fast else ("float32", "bfloat16")
    why = f"{faster} is faster than {slower} here" + ("" if fast else ": no GPU with bfloat16, no AMX, no AVX512_BF16")
    words = {key: getattr(model, key) for key in _BY_DEVICE["model"] if getattr(asked, key) == AUTO}
    if not model.adapted:
        words.pop("dtype", None)  # float32 on any device: nothing to report
    chosen = ", ".join(f"model.{key}=auto is {word}" for key, word in words.items())
    if here != model:
        otherwise = " and ".join(getattr(here, key) for key in words)
        yield f"{chosen}, as the run began, since its bits depend on it; begun here it would be {otherwise}: {why}"
    elif chosen:
        yield f"{chosen}: {why}" if asked.autocast == AUTO else f"{chosen}, as model.autocast={model.autocast}"
    elif not fast and "bfloat16" in (model.dtype, model.autocast):
        yield f"model.dtype={model.dtype} model.autocast={model.autocast}: {why}"
