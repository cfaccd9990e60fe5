"""What a model can be refused for: its files, shape, weights, vocabulary and device."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError

# The causal models whose layers the torch engine can drive, by model type.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """What a config.json says it is: its class, or its model type when it names no class. UserError for one that the
    torch engine cannot drive."""
    model_type = str(config.get("model_type", "of no name"))
    name = str((config.get("architectures") or [ARCHITECTURES.get(model_type, model_type)])[0])
    _check_heads(config)
    if name not in ARCHITECTURES.values():
        raise UserError(f"the architecture {name} is not supported; supported are {', '.join(ARCHITECTURES.values())}")
    return name


def check_files(folder: Path) -> None:
    """Refuse pipes and devices among the files: reading them may block for ever."""
    for file in folder.iterdir():
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise UserError(f"model folder {folder}: {file.name} is no regular file; put a copy of what it holds there")


def _check_heads(config: Mapping[str, Any]) -> None:
    """Refuse heads that nothing can be computed with: rotary positions turn each head's numbers in two halves, and
    queries are dealt to key-value heads evenly. What is missing or no number is left to the config's class."""
    hidden, heads, size = (config.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    shared = heads if (given := config.get("num_key_value_heads")) is None else given
    if not (isinstance(hidden, int) and isinstance(heads, int) and isinstance(shared, int)):
        return
    if heads < 1 or shared < 1 or heads % shared:
        raise UserError(
            f"num_attention_heads={heads} and num_key_value_heads={shared} in the model's config: each must be at "
            "least 1, and the first a multiple of the second"
        )
    dim = hidden / heads if size is None else size
    if isinstance(dim, int | float) and (dim < 2 or dim % 2):
        where = f"hidden_size={hidden} over num_attention_heads={heads}" if size is None else "head_dim"
        raise UserError(
            f"heads of {dim:g} numbers ({where} in the model's config) must be of an even number of at least 2, as "
            "rotary positions turn them in two halves: correct config.json, or choose another model"
        )


def check_config(config: PreTrainedConfig) -> None:
    """Refuse attention that forgets, by a sliding window shorter than the context in any layer; and positions that are
    rotated by other frequencies once a sequence is long, since keys in the cache would keep the short ones."""
    window, context = getattr(config, "sliding_window", None), config.max_position_embeddings
    layers = getattr(config, "layer_types", None)
    if window is not None and window < context and (layers is None or "sliding_attention" in layers):
        raise UserError(
            f"{config.model_type} model with a sliding window of {window} tokens: the engine attends to the whole "
            f"context only; set sliding_window to null in its config.json if completions stay shorter than {window} "
            "tokens"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    short = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and (short is None or short < context):
        raise UserError(
            f"{config.model_type} model with RoPE of type longrope, whose frequencies change beyond {short} of its "
            f"{context} positions: rollouts with a cache would be drawn from another distribution than the policy's; "
            "choose a model with RoPE of another type"
        )


@torch.no_grad()
def check_weights(model: Any, settings: ModelSettings) -> None:
    """Raises UserError for weights that are not finite. Quantised ones are not read."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.is_floating_point()}
    if math.isfinite(torch.nn.utils.get_total_norm(weights.values())):
        return
    for name, weight in weights.items():
        if bad := int((~torch.isfinite(weight)).sum()):
            where = f"model.adapter={settings.adapter}" if ".lora_" in name else f"model.path={settings.path}"
            raise UserError(
                f"{where}: {bad} of the {weight.numel()} numbers of {name} are not finite, so that the model computes "
                "nothing; it is damaged, or comes from a run that has diverged: take an earlier checkpoint, or a copy"
            )


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raises UserError for a tokenizer with tokens that the model has no embedding for."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= model.config.vocab_size:
        raise UserError(
            f"model.path={path}: the tokenizer has tokens up to number {largest}, and the model only "
            f"{model.config.vocab_size} of them (vocab_size, counted from 0); give the folder the tokenizer that the "
            "model was made with, or the model enough embeddings (transformers' resize_token_embeddings)"
        )


def check_device(settings: ModelSettings, device: torch.device) -> None:
    """Raises UserError for quantised weights where bitsandbytes has no kernels for them, and for activations that would
    be offloaded from a CPU."""
    if settings.offload_activations and device.type == "cpu":
        raise UserError(
            "model.offload_activations=true moves activations from a GPU's memory to the CPU's, and the device is cpu; "
            "leave it out (model.gradient_checkpointing=true alone keeps as little)"
        )
    if settings.quantize == "none":
        return
    if device.type != "cuda":
        raise UserError(
            f"model.quantize={settings.quantize} needs a CUDA GPU, whose kernels bitsandbytes brings, and the device "
            f"is {device.type}; use model.quantize=none"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"model.quantize={settings.quantize} needs bitsandbytes: pip install bitsandbytes")
