"""Low-rank adapters (LoRA) through PEFT: added to a model, saved separately, switched off for the reference.

PEFT replaces linear layers in place, so rollouts and updates use the adapters without further code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import read_object
from grpo_cli.settings import LoraSettings, ModelSettings
from grpo_cli.support.errors import UserError, closest, explained
from grpo_cli.support.extras import require

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base"
_IMPORTS = ("megatron_config", "tokenizer_kwargs")  # keys through which PEFT imports modules named in a file


def has_adapters(folder: Path) -> bool:
    """True if the folder holds adapters rather than a model."""
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """Return the base of the adapters in `folder`: the one saved beside them, else the one that they name."""
    if (folder / BASE).is_dir():
        return str(folder / BASE)
    return str(read_config(folder).get("base_model_name_or_path") or "")


def checkpoint_settings(folder: Path, without_files: bool, on_its_base: bool = False) -> dict[str, Any]:
    """Return the settings of a model that load what is saved in `folder`: a model, or adapters for the base beside
    them, or `on_its_base` the one that they name. `without_files` as in the settings of the run that saved it."""
    found: dict[str, Any] = {"adapter" if has_adapters(folder) else "path": str(folder), "random_init": False}
    if has_adapters(folder) and (on_its_base or (folder / BASE).is_dir()):
        found["path"] = base_of(folder)
    if without_files:
        found["eos_tokens"] = ()  # others would be of a tokenizer that was not loaded
    return found


def with_adapters(model: Any, settings: ModelSettings) -> Any:
    """Freeze the model's weights and give it adapters to train: new ones, which change nothing yet, or saved ones.

    Adapters are float32 even on bfloat16 weights. UserError for layers that the model lacks, for a saved adapter that
    cannot be read, and without PEFT.
    """
    if settings.adapter is not None:
        return _with_saved(model, settings.adapter, settings.lora)
    if settings.lora.rank == 0:
        return model
    from torch import nn  # imported here, so that listing a folder does not wait for it

    lora, name = settings.lora, type(model).__name__
    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in lora.targets:
        if target not in linear:
            raise UserError(f"model.lora.targets: {name} has no linear layer {target}{closest(target, linear)}")
    with _quiet() as peft:
        shape = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
        kind = {"use_dora": lora.dora, "use_rslora": lora.rslora, "task_type": "CAUSAL_LM"}
        return peft.get_peft_model(model, peft.LoraConfig(**shape, **kind, target_modules=list(lora.targets)))


def made_anew(settings: ModelSettings) -> ModelSettings:
    """Return settings that make new adapters of the saved ones' shape: for plans, which read no weights."""
    if settings.adapter is None:
        return settings
    saved = _lora_config(settings.adapter)
    if isinstance(names := saved["target_modules"], str):
        raise UserError(f"model.adapter={settings.adapter}: no plan of layers that {names!r} matches; leave fit out")
    lora = replace(settings.lora, rank=saved["r"], dora=bool(saved.get("use_dora")), targets=tuple(names))
    return replace(settings, adapter=None, lora=lora)


def _with_saved(model: Any, place: str, lora: LoraSettings) -> Any:
    folder = Path(place).expanduser()
    if not has_adapters(folder) or not (folder / WEIGHTS).is_file():
        raise UserError(f"model.adapter={place} holds no adapters: it lacks {CONFIG} or {WEIGHTS}")
    saved = _lora_config(place)
    for name, key in (("rank", "r"), ("dora", "use_dora"), ("rslora", "use_rslora")):
        if (wanted := getattr(lora, name)) and saved.get(key) != wanted:
            raise UserError(f"model.adapter={place} was saved with {key}={saved.get(key)}: leave model.lora.{name} out")
    with _quiet() as peft, explained(f"model.adapter={place} cannot be loaded onto {type(model).__name__}"):
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.lora_dropout = lora.dropout  # of the updates, not of the adapters
        return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True, config=config)


def _lora_config(place: str) -> dict[str, Any]:
    """Return the config of saved adapters. UserError for others than LoRA, and for what would have PEFT import."""
    saved = read_config(Path(place).expanduser())
    if saved.get("peft_type", "LORA") != "LORA" or any(map(saved.get, _IMPORTS)):
        raise UserError(f"model.adapter={place}: only LoRA is supported, without {' and '.join(_IMPORTS)} in {CONFIG}")
    return saved


def merge_adapters(model: Any) -> Any:
    """Return the base with its adapters in its weights; what embeddings and head share is parted if adapters change one
    of them. UserError where the result would compute anything else."""
    import torch

    base, name = model.get_base_model(), type(model.get_base_model()).__name__
    ids = torch.arange(3, 3 + min(12, base.config.get_text_config().vocab_size - 3))[None]
    with torch.no_grad(), _quiet():
        expected = model(input_ids=ids).logits.float()
        for shared in (base.get_input_embeddings(), base.get_output_embeddings()):
            if hasattr(shared, "get_base_layer"):  # it has adapters
                layer = shared.get_base_layer()
                layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        with explained(f"these adapters cannot be merged into {name}", "; leave --merge out"):
            found = model.merge_and_unload()
        head, embeddings = found.get_output_embeddings(), found.get_input_embeddings()
        if head is not None and not torch.equal(head.weight, embeddings.weight):
            for config in (found.config, found.config.get_text_config()):
                config.tie_word_embeddings = False
        off = (found(input_ids=ids).logits.float() - expected).norm() / expected.norm()
    if not off < (1e-3 if found.dtype == torch.float32 else 0.1):  # rounding alone moves those of bfloat16
        raise UserError(f"merged into {name}, these adapters compute other logits ({off:.1%} off): leave --merge out")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    if not (found := read_object(folder / CONFIG)):
        raise UserError(f"{folder} holds no adapters: it lacks {CONFIG}")
    return found


@contextmanager
def _quiet() -> Iterator[Any]:
    """Yield PEFT, without its warnings about its own names, and about shared weights, which `merge_adapters` parts."""
    require("peft", "an adapter (model.lora or model.adapter)")
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", ".*tie_word_embeddings", UserWarning)
        yield peft
