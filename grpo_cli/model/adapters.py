"""Low-rank adapters (LoRA) through PEFT: put on a model, saved by themselves, switched off for the reference.

PEFT replaces linear layers in place, so rollouts and updates use the adapters without further code.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.settings import LoraSettings, ModelSettings
from grpo_cli.support.errors import UserError, closest

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base"
_IMPORTS = ("megatron_config", "tokenizer_kwargs")  # by which PEFT imports modules that a file names


def has_adapters(folder: Path) -> bool:
    """Whether the folder holds adapters, and no model of its own."""
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """What the adapters in `folder` were trained on top of: the base saved beside them, else where they say it was."""
    if (folder / BASE).is_dir():
        return str(folder / BASE)
    return str(_read_config(folder).get("base_model_name_or_path") or "")


def with_adapters(model: Any, settings: ModelSettings) -> Any:
    """The model with its weights frozen and adapters to train: new ones, which change nothing yet, or saved ones.

    Adapters are float32 even on bfloat16 weights. Raises UserError for layers that the model lacks, for a saved adapter
    that cannot be read, and without PEFT.
    """
    if settings.adapter is not None:
        return _with_saved(model, settings.adapter, settings.lora)
    if settings.lora.rank == 0:
        return model
    from torch import nn  # imported here, so that listing a folder does not wait for it

    peft = _peft()
    lora = settings.lora
    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in lora.targets:
        if target not in linear:
            raise UserError(
                f"model.lora.targets: {type(model).__name__} has no linear layer {target}{closest(target, linear)}; "
                f"it has {', '.join(sorted(linear))}"
            )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    with _quiet():
        return peft.get_peft_model(model, config)


def _with_saved(model: Any, place: str, lora: LoraSettings) -> Any:
    folder = Path(place).expanduser()
    if not has_adapters(folder) or not (folder / WEIGHTS).is_file():
        raise UserError(f"model.adapter={place} holds no adapters: it lacks {CONFIG} or {WEIGHTS}")
    saved = _read_config(folder)
    odd = [key for key in _IMPORTS if saved.get(key)]
    if saved.get("peft_type", "LORA") != "LORA" or odd:
        what = f"its {CONFIG} says {', '.join(odd)}" if odd else f"they are of the kind {saved['peft_type']}"
        raise UserError(f"model.adapter={place} holds no adapters that are known here ({what}): only LoRA's are")
    if lora.rank and saved.get("r") != lora.rank:
        raise UserError(
            f"model.adapter={place} has rank {saved.get('r')}, but model.lora.rank={lora.rank}; leave it at 0 to take "
            "the adapter as it is"
        )
    peft = _peft()
    try:
        with _quiet():
            return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except (ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
        reason = f"{type(error).__name__}: {' '.join(line.strip() for line in str(error).splitlines()[:2])}"
        raise UserError(f"model.adapter={place} cannot be put on {type(model).__name__} ({reason})") from error


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{folder / CONFIG} is no adapter's config")
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the FutureWarnings of `transformers` about names that PEFT still uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError("model.lora and model.adapter need PEFT: pip install peft, or the extra `peft`") from error
    return peft


@dataclass(frozen=True)
class AdapterOff:
    """The model with its adapters off, in the shape that `anatomy` reads: a reference that takes no memory."""

    adapted: Any

    def get_base_model(self) -> AdapterOff:
        return self

    def parameters(self) -> Iterator[Any]:
        yield from self.adapted.parameters()

    @property
    def model(self) -> Any:
        return _Half(self.adapted, self.adapted.get_base_model().model)

    @property
    def lm_head(self) -> Any:
        return _Half(self.adapted, self.adapted.get_base_model().lm_head)


@dataclass(frozen=True)
class _Half:
    """One half of a model; adapters are off while it runs."""

    adapted: Any
    half: Callable[..., Any]

    @property
    def config(self) -> Any:
        return self.adapted.get_base_model().config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.adapted.disable_adapter():
            return self.half(*args, **kwargs)
