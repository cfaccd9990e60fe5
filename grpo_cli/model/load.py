"""Hugging Face folders in and out: the embedded tiny model, a local folder or a hub id becomes a model and a tokenizer.

What a folder holds is checked from its config before any weights are read. Weights are safetensors only, never pickles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from grpo_cli.errors import UserError
from grpo_cli.settings import ModelSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TINY = "tiny"

_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def supported_architectures() -> tuple[str, ...]:
    """The causal models whose layers the torch engine can drive."""
    return tuple(_ARCHITECTURE_OF_TYPE.values())


def load_model(settings: ModelSettings, device: torch.device) -> PreTrainedModel:
    """The model of `model.path` on `device`, without dropout.

    With `random_init` only the config is read and the weights come from torch's global generator. Layers recompute
    their activations only in train mode, so a model with gradient checkpointing comes back in train mode and any other
    in eval mode; since every dropout is zero, both compute the same.

    Raises UserError for a missing or incomplete folder, an unreachable hub id, an unsupported architecture.
    """
    source = _source(settings.path)
    config = _made_config(settings) if settings.random_init else _read_config(source, settings)
    dtype = DTYPES.get(settings.dtype)
    if dtype is None:
        raise UserError(f"model.dtype={settings.dtype} is not one of {', '.join(DTYPES)}")
    config.attention_dropout = 0.0
    if settings.random_init:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=settings.trust_remote_code)
    else:
        model = _read_weights(source, config, dtype, settings)
    check_supported(model)
    if settings.gradient_checkpointing:
        # the second name is what releases of transformers without the first call it
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if model.device != device:
        model.to(device)
    return model.train(settings.gradient_checkpointing)


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the weights. Raises UserError when there is none.

    Random weights of a written-down architecture understand no words, so without a folder here the embedded tokenizer
    serves them, and nothing is asked of the network.
    """
    source = _source(settings.path)
    if settings.random_init and settings.architecture is not None and not isinstance(source, Path):
        source = _source(TINY)
    if isinstance(source, Path) and not any((source / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"model folder {source} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); "
            "save one there with tokenizer.save_pretrained(folder)"
        )
    with _reading(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=settings.trust_remote_code)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a reply: those of the generation config (Llama 3 has several), then the tokenizer's."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = generation if isinstance(generation, list) else [generation]
    ids = tuple(dict.fromkeys(int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None))
    if not ids:
        raise UserError(
            "the model has no end-of-sequence token: neither its generation_config.json nor its tokenizer names one; "
            "set eos_token in the folder's tokenizer_config.json"
        )
    return ids


def pad_token_id(tokenizer: PreTrainedTokenizerBase, eos: tuple[int, ...]) -> int:
    """What fills the unused places of a batch: the tokenizer's own token, else an end-of-sequence token."""
    return int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else eos[0]


def save_pretrained(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that plain `transformers` loads: safetensors, config, generation config, tokenizer."""
    with _no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_supported(model: PreTrainedModel) -> None:
    """Raises UserError unless the torch engine can drive this model's layers."""
    name = type(model).__name__
    if name not in supported_architectures():
        raise UserError(_unsupported(name))
    _check_window(model.config)


def _source(path: str) -> Path | str:
    """A folder, or a hub id when nothing of that name is here and the name can be one."""
    if path == TINY:
        return Path(str(files("grpo_cli.model") / "tiny"))
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model folder {folder} has no config.json; model.path wants a folder saved by transformers"
            )
        return folder
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists() or not path
    if looks_local:
        raise UserError(
            f"model.path={path} is no folder; give a folder saved by transformers, a hub id such as "
            f"Qwen/Qwen2.5-0.5B-Instruct, or {TINY}"
        )
    return path


def _made_config(settings: ModelSettings) -> PreTrainedConfig:
    """The config of `model.architecture`, or else of `model.path`."""
    if settings.architecture is None:
        return _read_config(_source(settings.path), settings)
    words = dict(settings.architecture)
    named = _architecture(words)
    if named not in supported_architectures():
        raise UserError(_unsupported(named))
    config = AutoConfig.for_model(**words)
    _check_window(config)
    return config


def _read_config(source: Path | str, settings: ModelSettings) -> PreTrainedConfig:
    """The config, once its architecture is known to be one of ours; nothing else is read or run before that."""
    with _reading(source, "config.json"):
        raw, _ = PreTrainedConfig.get_config_dict(source)
        named = _architecture(raw)
        if named not in supported_architectures():
            raise UserError(_unsupported(named))
        config = AutoConfig.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    _check_window(config)
    return config


def _read_weights(
    source: Path | str, config: PreTrainedConfig, dtype: torch.dtype, settings: ModelSettings
) -> PreTrainedModel:
    with _reading(source, "safetensors weights"), _no_progress_bars():
        # with `output_loading_info` a pair comes back, which its annotation does not say
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=settings.trust_remote_code,
        )
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UserError(f"model {source} lacks {len(missing)} weights of its architecture, such as {missing[0]}")
    return model


def _check_window(config: PreTrainedConfig) -> None:
    """Refuse attention that forgets: a sliding window shorter than the context, in any layer."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    slides = window is not None and (layers is None or "sliding_attention" in layers)
    if slides and window < config.max_position_embeddings:
        raise UserError(
            f"{config.model_type} model with a sliding window of {window} tokens: the engine attends to the whole "
            f"context only; set sliding_window to null in its config.json if replies stay shorter than {window} tokens"
        )


def _architecture(config: Mapping[str, Any]) -> str:
    """What a config.json says it is: its class, or its model type when it names no class."""
    model_type = str(config.get("model_type", "of no name"))
    return str((config.get("architectures") or [_ARCHITECTURE_OF_TYPE.get(model_type, model_type)])[0])


def _unsupported(name: str) -> str:
    return f"the architecture {name} is not supported; supported are {', '.join(supported_architectures())}"


@contextmanager
def _reading(source: Path | str, what: str) -> Iterator[None]:
    """Whatever goes wrong while a foreign file is read is said in one line, with what to do about it.

    Every kind of error is caught because the readers raise every kind: a misshapen tokenizer.json alone gives KeyError,
    TypeError or AttributeError, depending on where it first surprises its parser.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no reason given')}"
        if isinstance(source, Path):
            raise UserError(f"model folder {source}: its {what} cannot be read ({reason}); save it anew") from error
        raise UserError(
            f"model.path={source} is no folder here and its {what} could not be had from the hub ({reason}); "
            "without network, download the model elsewhere and give the path of its folder"
        ) from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """The bars of transformers would tear the live view; whoever had them on has them back afterwards."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
