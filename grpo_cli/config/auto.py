"""What `auto` stands for: decided once, when a command begins, written down in its `run.json`, and kept by a resumed
run on whatever machine, since its bits depend on it.

Numbers are the model's or the task's to say, in their `recipe` in `conf/`; precisions go by the device. A typed value
and that of a named experiment are no `auto`.
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
# The settings that may be `auto`, by their groups. Of numbers, the part whose recipe says them, and by which word.
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
# A part of one's own that brings no recipe has that of the file which the shipped ones are based on.
_BASE = {"model": "hf", "task": "_text"}
Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)


def as_decided(settings: RunSettings | EvalRunSettings) -> dict[str, dict[str, Any]]:
    """The values of what may be left open, by group."""
    return {
        group: {key: getattr(found, key) for key in keys if hasattr(found, key)}
        for group, keys in _OPEN.items()
        if (found := getattr(settings, group, None)) is not None
    }


def as_begun(settings: RunSettings | EvalRunSettings, group: str) -> dict[str, Any]:
    """Those values as the resumed run recorded them; empty if no run is resumed, or if it had no `auto`."""
    return _begun(settings.run_dir, group) if isinstance(settings, RunSettings) and settings.resume else {}


def _begun(run_dir: str, group: str) -> dict[str, Any]:
    record = read_record(Path(run_dir))
    written = {} if record is None else record.config.get(group)
    known = written if isinstance(written, dict) else {}
    return {key: value for key, value in known.items() if key in _OPEN[group] and value != AUTO}


def fill(values: dict[str, Any]) -> None:
    """Replace `auto` in a composed configuration with the numbers of the recipes."""
    for group, keys in _BY_RECIPE.items():
        settings = values[group] if isinstance(values.get(group), dict) else {}
        for name in [name for name in keys if settings.get(name) == AUTO]:
            begun = _begun(str(values["run_dir"]), group) if values.get("resume") else {}
            settings[name] = begun.get(name, _of_the_recipe(values, *keys[name]))


def _of_the_recipe(values: Mapping[str, Any], part: str, word: str) -> Any:
    """What the part says by this word, at most what the model says by it. An episode has as many replies as turns."""
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
    """The settings with precisions in place of `auto`. `say` is given the choice, and a warning if it is slow here.

    `fast`: whether the device is faster in bfloat16 than in float32; None: ask the settings' device.
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
    """Weights below adapters are kept in bfloat16 where they are computed in it: as they are frozen, no small step of
    theirs is lost. Those that are trained stay float32, and those that are computed in float32."""
    autocast = ("bfloat16" if fast else "none") if model.autocast == AUTO else model.autocast
    half = model.adapted and autocast == "bfloat16"
    dtype = ("bfloat16" if half else "float32") if model.dtype == AUTO else model.dtype
    return replace(model, autocast=autocast, dtype=dtype)


def _remarks(asked: ModelSettings, here: ModelSettings, model: ModelSettings, fast: bool) -> Iterator[str]:
    faster, slower = ("bfloat16", "float32") if fast else ("float32", "bfloat16")
    why = f"{faster} is faster than {slower} here" + ("" if fast else ": no GPU with bfloat16, no AMX, no AVX512_BF16")
    words = {key: getattr(model, key) for key in _BY_DEVICE["model"] if getattr(asked, key) == AUTO}
    if not model.adapted:
        words.pop("dtype", None)  # float32 whatever the device: there is nothing to tell
    chosen = ", ".join(f"model.{key}=auto is {word}" for key, word in words.items())
    if here != model:
        otherwise = " and ".join(getattr(here, key) for key in words)
        yield f"{chosen}, as the run began, since its bits depend on it; begun here it would be {otherwise}: {why}"
    elif chosen:
        yield f"{chosen}: {why}" if asked.autocast == AUTO else f"{chosen}, as model.autocast={model.autocast}"
    elif not fast and "bfloat16" in (model.dtype, model.autocast):
        yield f"model.dtype={model.dtype} model.autocast={model.autocast}: {why}"
