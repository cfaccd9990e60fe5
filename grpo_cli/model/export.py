"""Writes a model for other programs: an ordinary folder with its card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from transformers import GenerationConfig

from grpo_cli.model.adapters import BASE, has_adapters, merge_adapters
from grpo_cli.model.load import (
    TINY,
    eos_token_ids,
    load_model,
    load_tokenizer,
    pad_token_id,
    save_pretrained,
    source_of,
)
from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain

CARD = "README.md"
_SECONDS = 10.0  # to wait for the hub


def write_model(
    settings: ModelSettings,
    checkpoint: Path,
    folder: Path,
    merge: bool,
    dtype: str | None,
    sampling: Mapping[str, Any],
    turn_end: Callable[[Any], int | None],
) -> None:
    """Write the model of a checkpoint, its tokenizer and a generation config to `folder`. `settings` load it
    (`at_checkpoint`); with `merge` adapters become part of the base's weights. What is written has a
    `dtype`, None: as it is. `turn_end` returns the token by which a tokenizer's chat template ends a turn.

    Adapters that were trained on 4-bit or 8-bit weights are merged into the unquantised ones, and the result rounds
    differently from what was trained. UserError if there is nothing to merge, and for a base that is unavailable or
    quantised, or that lies only in the run and is not merged.
    """
    adapted = has_adapters(checkpoint)
    if merge and not adapted:
        raise UserError(f"--merge: {checkpoint} holds no adapters but an ordinary model; leave it out")
    if adapted and not merge and (checkpoint / BASE).is_dir():
        raise UserError(f"the base of {checkpoint} lies only beside it, and adapters need it: add --merge")
    model = load_model(settings, torch.device("cpu"), any_family=True)
    tokenizer = load_tokenizer(settings if adapted else replace(settings, path=str(checkpoint)))
    eos = eos_token_ids(model, tokenizer, settings.eos_tokens, turn_end(tokenizer))
    if merge:
        model = merge_adapters(model)
    elif adapted:  # the path that was written down may be of another machine
        model.active_peft_config.base_model_name_or_path = str(source_of(settings.path))
    save_pretrained(model if dtype is None else model.to(getattr(torch, dtype)), tokenizer, folder)
    ends = {"eos_token_id": list(eos), "pad_token_id": pad_token_id(tokenizer, eos)}
    GenerationConfig(**ends, **sampling).save_pretrained(folder)  # not the base's penalties, which no rollout had


def licence_of(path: str) -> str | None:
    """Return the licence that the card of a base (a folder or a hub id) names, if any."""
    try:
        source = source_of(path)
        if isinstance(source, str):
            card = HfApi().model_info(source, timeout=_SECONDS).card_data
        else:
            card = ModelCard.load(source / CARD, ignore_metadata_errors=True).data
        licence = card.get("license") if card is not None else None
    except Exception:  # a base that is gone, a file, or the hub's client, which raises those of httpx or of httpx2
        return None
    return None if licence is None else plain(licence)


def write_card(folder: Path, base: str, licence: str | None, text: str) -> None:
    """Write the model card, with how the model is served and evaluated."""
    hub_id = None if base == TINY or Path(base).expanduser().is_dir() else base  # the hub takes no folders
    use = _used(folder, hub_id or "<folder of the base>")
    data = ModelCardData(
        base_model=hub_id,
        license=licence,
        library_name="peft" if has_adapters(folder) else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "grpo-cli"],
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n## Use\n\n{use}").save(folder / CARD)


def _used(folder: Path, base: str) -> str:
    """Return the commands that serve and evaluate a model, or adapters on their base."""
    if has_adapters(folder):
        evaluated = f"lm_eval --model hf --model_args pretrained={base},peft=<this folder>,tokenizer=<this folder>"
        return f"    {evaluated}\n\nFor vLLM export the run with --merge.\n"
    chats = (folder / "chat_template.jinja").is_file()
    text = """[{"role": "user", "content": "<question>"}]""" if chats else '"<prompt>"'
    asked = f"""from transformers import pipeline as p; print(p("text-generation", "<this folder>")({text}))"""
    served = "    vllm serve <this folder>\n    lm_eval --model hf --model_args pretrained=<this folder>\n"
    return f"    python -c '{asked}'\n{served}"
