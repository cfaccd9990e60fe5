"""What `auto` stands for in `model.dtype` and `model.autocast`: decided once, when a command begins, for its device.

Nobody but the door knows the word. A resumed run has what it began with, on whatever machine: its bits depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from grpo_cli.config.auto import AUTO, OPEN, Settings, as_begun
from grpo_cli.settings import ModelSettings
from grpo_cli.support.processor import fast_in_bfloat16

KEYS = OPEN["model"]


def decided(settings: Settings, say: Callable[[str], None], fast: bool | None = None) -> Settings:
    """The settings without `auto`; what was decided is said, and what is slow here though it was asked for.

    `fast`: whether the device computes bfloat16 faster than float32; None: as the settings' device is found to.
    """
    fast = fast_in_bfloat16(settings.device) if fast is None else fast
    begun = as_begun(settings, "model")
    here = decided_model(settings.model, fast)
    changed = {key: begun[key] for key in KEYS if getattr(settings.model, key) == AUTO and key in begun}
    model = decided_model(replace(settings.model, **changed), fast)
    for line in _lines(settings.model, here, model, fast):
        say(line)
    return replace(settings, model=model)


def decided_model(model: ModelSettings, fast: bool) -> ModelSettings:
    """Weights below adapters are kept in bfloat16 where they are computed in it: as they are frozen, no small step of
    theirs is lost. Those that are trained stay float32, and those that are computed in float32."""
    autocast = ("bfloat16" if fast else "none") if model.autocast == AUTO else model.autocast
    half = model.adapted and autocast == "bfloat16"
    dtype = ("bfloat16" if half else "float32") if model.dtype == AUTO else model.dtype
    return replace(model, autocast=autocast, dtype=dtype)


def _lines(asked: ModelSettings, here: ModelSettings, model: ModelSettings, fast: bool) -> Iterator[str]:
    faster, slower = ("bfloat16", "float32") if fast else ("float32", "bfloat16")
    why = f"{faster} is faster than {slower} here" + ("" if fast else ": no GPU with bfloat16, no AMX, no AVX512_BF16")
    words = {key: getattr(model, key) for key in KEYS if getattr(asked, key) == AUTO}
    if not model.adapted:
        words.pop("dtype", None)  # float32 whatever the device: there is nothing to tell
    told = ", ".join(f"model.{key}=auto is {word}" for key, word in words.items())
    if here != model:
        otherwise = " and ".join(getattr(here, key) for key in words)
        yield f"{told}, as the run began, since its bits depend on it; begun here it would be {otherwise}: {why}"
    elif told:
        yield f"{told}: {why}" if asked.autocast == AUTO else f"{told}, as model.autocast={model.autocast}"
    elif not fast and "bfloat16" in (model.dtype, model.autocast):
        yield f"model.dtype={model.dtype} model.autocast={model.autocast}: {why}"
