"""Reasons to refuse a model: its files, shape, weights, vocabulary and device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import require

# The causal models that the torch engine can run, by model type.
ARCHITECTURES = {kind: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in ("llama", "mistral", "qwen2", "qwen3")}


def architecture_of(config: Mapping[str, Any], any_family: bool = False) -> str:
    """Return the model class that a config.json names, or that of its model type. UserError for one that the torch
    engine cannot run; with `any_family` for one that is no causal model of `transformers`."""
    model_type = str(config.get("model_type", "without a name"))
    causal = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if any_family else ARCHITECTURES).get(model_type, model_type)
    name = str((config.get("architectures") or [causal])[0])
    if not any_family and name not in ARCHITECTURES.values():
        known = ", ".join(ARCHITECTURES.values())
        named = f"{name}, of model.path or model.architecture,"
        raise UserError(f"{named} is not supported, only {known}; for others use engine=generate")
    if any_family and causal == model_type and "auto_map" not in config:
        raise UserError(f"the architecture {name} ({model_type}) is no causal language model that transformers knows")
    return name


def check_stored(config: Mapping[str, Any], source: Path | str) -> None:
    """Refuse a config.json of quantised weights, which are neither trained nor merged into."""
    for key in ("quantization_config", "compression_config", "quantization"):  # of transformers, older ones, MLX
        if config.get(key):
            made_from = "name the model that it was made from (model.path, or --base of an export)"
            raise UserError(f"{source} is stored quantised ({key} in its config.json): {made_from}")


def context_of(config: PreTrainedConfig) -> int:
    """Return the most tokens that the model has positions for; without a limit, more than any run needs."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30


def window_of(config: PreTrainedConfig) -> int | None:
    """Return the sliding window of the layers that have one; None where no token can be outside of it."""
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or window >= context_of(config):
        return None
    return window if layers is None or "sliding_attention" in layers else None


def check_config(config: PreTrainedConfig, any_family: bool = False) -> None:
    """Refuse a sliding window shorter than the context in any layer, unless the model's own cache may handle it
    (`any_family`); and RoPE whose frequencies change once a sequence is long, since cached keys would keep the old
    ones."""
    context = context_of(config)
    if not any_family and (window := window_of(config)) is not None:
        raise UserError(
            f"model.path has a sliding window of {window} tokens: use engine=generate, or set it to null in config.json"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    short = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and (short is None or short < context):
        raise UserError(
            f"RoPE of type longrope makes cached keys wrong beyond {short} of {context} positions: take another model"
        )


@torch.no_grad()
def check_weights(model: Any, settings: ModelSettings) -> None:
    """Refuse weights that are not finite. Quantised ones are not read."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.norm().isfinite():
            where = f"model.adapter={settings.adapter}" if ".lora_" in name else f"model.path={settings.path}"
            raise UserError(f"{where}: {name} has numbers that are not finite: use an earlier checkpoint, or a copy")


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for."""
    largest, size = max(tokenizer.get_vocab().values(), default=-1), model.config.get_text_config().vocab_size
    if largest >= size:
        raise UserError(
            f"model.path={path}: token ids up to {largest}, but only {size} embeddings: save the model's own tokenizer"
        )


def check_device(settings: ModelSettings, device: torch.device) -> None:
    """Refuse quantised weights where bitsandbytes has no kernels, and offloading activations from a CPU."""
    if settings.offload_activations and device.type == "cpu":
        raise UserError("model.offload_activations=true needs a GPU, and the device is cpu; use false")
    if settings.quantize != "none" and device.type != "cuda":
        raise UserError(f"model.quantize={settings.quantize} needs a CUDA GPU, not {device.type}; use none")
    if settings.quantize != "none":
        require("bitsandbytes", f"model.quantize={settings.quantize}")
