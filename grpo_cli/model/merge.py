"""`grpo merge`: merges saved adapters and their base into one ordinary model folder."""

from __future__ import annotations

from pathlib import Path

import torch

from grpo_cli.model.adapters import base_of, has_adapters
from grpo_cli.model.load import DTYPES, load_model, load_tokenizer, model_config, save_pretrained
from grpo_cli.runs.checkpoint import find_checkpoint
from grpo_cli.settings import LoraSettings, ModelSettings
from grpo_cli.support.errors import UserError


def merge(place: Path, target: Path, base: str | None, dtype: str) -> Path:
    """Write the merged model of a run's newest checkpoint, or of one checkpoint, to `target`; returns the checkpoint.

    The base is the one saved with the adapters or named by them. Adapters that were trained on 4-bit or 8-bit weights
    are merged into the unquantised ones, and the result rounds differently from what was trained.

    UserError if there are no adapters, if `target` exists and is not an empty folder, and if the base is unavailable or
    quantised.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype={dtype} must be one of {', '.join(DTYPES)}")
    checkpoint = _adapters(place)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder; name a new one")
    below = _settings(base or base_of(checkpoint), dtype, str(checkpoint))
    if getattr(model_config(below, any_family=True), "quantization_config", None) is not None:
        raise UserError(
            f"{below.path} is quantised, and adapters cannot be merged into quantised weights; "
            "name the model that it was made from with --base"
        )
    merged = load_model(below, torch.device("cpu"), any_family=True).merge_and_unload()
    save_pretrained(merged, load_tokenizer(_settings(str(checkpoint), dtype, None)), target)
    return checkpoint


def _adapters(place: Path) -> Path:
    folder = place.expanduser()
    found = find_checkpoint(folder)
    if found.path is None and found.skipped:
        raise UserError(f"{place} holds no complete checkpoint: {'; '.join(found.skipped)}")
    checkpoint = found.path or folder
    if not has_adapters(checkpoint):
        raise UserError(
            f"{place} holds no adapters; give a run with model.lora.rank= or one of its checkpoints (what a run "
            "without it saves is an ordinary model folder already)"
        )
    return checkpoint


def _settings(path: str, dtype: str, adapter: str | None) -> ModelSettings:
    return ModelSettings(
        path=path,
        dtype=dtype,
        autocast="none",
        random_init=False,
        trust_remote_code=False,
        gradient_checkpointing=False,
        offload_activations=False,
        quantize="none",
        lora=LoraSettings(rank=0, alpha=1.0, dropout=0.0, targets=(), dora=False, rslora=False),
        adapter=adapter,
        eos_tokens=(),
        chat_template_kwargs=None,
        architecture=None,
        recipe={},
    )
