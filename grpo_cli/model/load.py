"""Loads and saves Hugging Face folders: the embedded tiny model, a local folder or a hub id.

A folder's config is checked before any weights are read. Weights are safetensors only, never pickles.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from grpo_cli.model.adapters import BASE, base_of, checkpoint_settings, has_adapters, with_adapters
from grpo_cli.model.anatomy import is_llama_shaped, unwrapped
from grpo_cli.model.checkpointing import recompute_layers
from grpo_cli.model.checks import architecture_of, check_config, check_device, check_stored, check_weights
from grpo_cli.model.packed import allow_packing
from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError, explained

transformers_logging.disable_progress_bar()  # of files and weights: they would break the live view
TINY = "tiny"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def load_model(
    settings: ModelSettings, device: torch.device, any_family: bool = False, layers: int | None = None
) -> Any:
    """Return the model of `model.path` on `device`, in eval mode, without dropout of its own in either mode:
    Llama-shaped, or with `any_family` whatever causal model `transformers` knows.

    With `random_init` only the config is read, of which `layers` may replace the number of layers, and the weights come
    from torch's global generator. With `lora` or `adapter` the model is in PEFT's wrapper, with only the adapters
    trained; theirs is the only dropout. UserError for what is missing, broken, or not supported here or by `device`.
    """
    check_device(settings, device)
    dtype = getattr(torch, settings.dtype)
    source = None if settings.random_init else source_of(settings.path)
    config = model_config(settings, any_family) if source is None else _read_config(source, settings, any_family)
    for name, value in vars(config).items():  # each family has words of its own: resid_pdrop, layerdrop
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    if source is not None:
        model: Any = _read_weights(source, config, dtype, settings, device)
        for weight in () if settings.adapted or device.type != "cpu" else model.parameters():
            if weight.data_ptr() % 64:  # as it lies in the file, for which a product may take another kernel, and bits
                weight.data = weight.data.clone()
    else:
        if layers is not None:
            config.num_hidden_layers, kinds = layers, getattr(config, "layer_types", None)
            config.layer_types = kinds and (kinds * layers)[:layers]
        with device:  # drawing billions of numbers is fast on a GPU only
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=settings.trust_remote_code)
    if device.type == "cuda" and is_llama_shaped(model):
        allow_packing(model)  # selects our attention, which differs there in float32
    if settings.quantize == "none" and model.device != device:  # quantised weights are loaded in place
        model = model.to(device)
    model = with_adapters(model, settings).eval()
    _recompute(unwrapped(model), settings)  # after PEFT, which would have the embeddings require gradients
    if not settings.random_init:
        check_weights(model, settings)
    return model


def _recompute(model: PreTrainedModel, settings: ModelSettings) -> None:
    name, what, llama_shaped = type(model).__name__, settings.gradient_checkpointing, is_llama_shaped(model)
    if what == "full" and not model.supports_gradient_checkpointing:
        raise UserError(f"model.gradient_checkpointing=full is not supported by {name}; use none")
    if settings.offload_activations and not llama_shaped:
        raise UserError(f"model.offload_activations=true needs Llama-shaped layers, and {name} has others; use false")
    if what == "full" or (what == "elementwise" and llama_shaped):
        offload = partial(save_on_cpu, pin_memory=True)
        recompute_layers(model, what, offload if settings.offload_activations else nullcontext)


def at_checkpoint(settings: ModelSettings, folder: Path) -> ModelSettings:
    """Return the settings that load what a run of `settings` saved in `folder`: a model, or adapters for its base."""
    return replace(settings, **checkpoint_settings(folder, settings.without_files))


def model_config(settings: ModelSettings, any_family: bool = False) -> PreTrainedConfig:
    """Return the model's config: from `model.architecture` if given and `model.path` is not a local folder, so that
    nothing is fetched from the hub; else from config.json. UserError for an invalid one, and as in `load_model`."""
    if settings.architecture is None or settings.path == TINY or Path(settings.path).expanduser().is_dir():
        return _read_config(source_of(settings.path), settings, any_family)
    kwargs = dict(settings.architecture)
    named = architecture_of(kwargs, any_family)
    with explained(f"model.architecture does not describe a {named}"):
        config = AutoConfig.for_model(**kwargs)
    config.architectures = [named]
    config.eos_token_id = None  # some configs default to an id that this tokenizer never emits
    check_config(config, any_family)
    return config


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """Return the tokenizer saved with the adapters, else with the weights; for random weights of a preset's shape that
    of the embedded model (a token per byte). A chat template beside adapters counts. UserError if there is none."""
    adapters = Path(settings.adapter).expanduser() if settings.adapter is not None else None
    of_the_model = TINY if settings.without_files else settings.path
    source = adapters if adapters is not None and _has_tokenizer(adapters) else source_of(of_the_model)
    if isinstance(source, Path) and not _has_tokenizer(source):  # of which transformers would make an empty one
        raise UserError(f"model folder {source} has no tokenizer: save the model's own there ({_TOKENIZER_FILES[0]})")
    with _reading(source, "tokenizer"):
        found = AutoTokenizer.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
        if adapters is not None and (template := adapters / "chat_template.jinja").is_file():
            found.chat_template = template.read_text(encoding="utf-8")
        return found


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def eos_token_ids(
    model: Any, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str] = (), turn_end: int | None = None
) -> tuple[int, ...]:
    """Return every token that ends a completion: `tokens` if given, else those of the generation config (Llama 3 has
    several), the tokenizer's and `turn_end`, by which its chat template ends a turn. UserError for a token that the
    tokenizer does not have, and if no token is found."""
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in tokens if token not in vocabulary]:
        own = f"name tokens that it has, such as {tokenizer.eos_token}, or [] for the model's own"
        raise UserError(f"model.eos_tokens: the tokenizer has no token {', '.join(unknown)}; {own}")
    generation = getattr(model.generation_config, "eos_token_id", None)
    listed = generation if isinstance(generation, list) else [generation]
    known = [int(one) for one in (*listed, tokenizer.eos_token_id, turn_end) if one is not None]
    found = tuple(dict.fromkeys([vocabulary[token] for token in tokens] or known))
    if not found:
        raise UserError("the model has no end-of-sequence token of its own: name one with model.eos_tokens=[...]")
    return found


def pad_token_id(tokenizer: PreTrainedTokenizerBase, eos: tuple[int, ...]) -> int:
    """Return the tokenizer's padding token, else an end-of-sequence token."""
    return int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else eos[0]


def save_pretrained(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    with_base: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a folder that plain `transformers` loads: safetensors, config, generation config, tokenizer.

    For a model with adapters only these are written, as PEFT does; `with_base` also saves the base weights, if they are
    stored nowhere else. `state_dict`: a copy of the model's, which is saved in its place.
    """
    kwargs: dict[str, Any] = {} if state_dict is None else {"state_dict": dict(state_dict)}
    if adapted := hasattr(model, "peft_config"):
        kwargs["save_embedding_layers"] = False  # else PEFT asks the hub whether the base's vocabulary has changed
    model.save_pretrained(folder, **kwargs)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # these are written for their owner alone
        shutil.copymode(folder / "tokenizer_config.json", weights)
    if adapted and with_base:
        base = unwrapped(model)  # under its names without adapters
        state = {name: weight for name, weight in base.state_dict().items() if ".lora_" not in name}
        state = {name.replace(".base_layer.", "."): weight for name, weight in state.items()}
        save_pretrained(base, tokenizer, folder / BASE, state_dict=state)


def source_of(path: str) -> Path | str:
    """Return a folder, or a hub id if there is no such folder. UserError for one that the hub and its cache lack."""
    if path == TINY:
        return Path(str(files("grpo_cli.model") / "tiny"))
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if (folder / "config.json").is_file():
            return folder
        if has_adapters(folder):
            raise UserError(f"model.path={path} holds adapters: set model.adapter={path} model.path={base_of(folder)}")
        raise UserError(f"model folder {folder} has no config.json; model.path needs a folder saved by transformers")
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists():
        way_out = "give a folder saved by transformers, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        raise UserError(f"model.path={path} is not a folder here: {way_out}")
    with _reading(path, "config.json"):  # at once: `transformers` tries again for most of a minute
        if try_to_load_from_cache(path, "config.json") is None:
            get_hf_file_metadata(hf_hub_url(path, "config.json"))
    return path


def _read_config(source: Path | str, settings: ModelSettings, any_family: bool) -> PreTrainedConfig:
    """Return the config, its architecture checked before anything else is read or run."""
    with _reading(source, "config.json"):
        raw, _ = PreTrainedConfig.get_config_dict(source)
        check_stored(raw, source)
        architecture_of(raw, any_family)
        config = AutoConfig.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    check_config(config, any_family)
    return config


def _read_weights(
    source: Path | str, config: PreTrainedConfig, dtype: torch.dtype, settings: ModelSettings, device: torch.device
) -> PreTrainedModel:
    """Return the model with its weights: 4-bit ones are NF4 with quantised scales (arXiv 2305.14314)."""
    kwargs: dict[str, Any] = {"config": config, "dtype": dtype, "trust_remote_code": settings.trust_remote_code}
    if settings.quantize != "none":
        kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, f"load_in_{settings.quantize}": True}
        computed_in = torch.bfloat16 if settings.autocast == "bfloat16" else dtype
        kwargs["quantization_config"] = BitsAndBytesConfig(**kind, bnb_4bit_compute_dtype=computed_in)
        kwargs["device_map"] = {"": device}
    with _reading(source, "safetensors weights"):
        load: Any = AutoModelForCausalLM.from_pretrained  # its annotation lacks the pair that it returns here
        model, info = load(source, use_safetensors=True, output_loading_info=True, **kwargs)
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"model {source} lacks {len(missing)} weights of its architecture, such as {missing[0]}")
    return model


def _reading(source: Path | str, what: str) -> AbstractContextManager[None]:
    if isinstance(source, Path):
        return explained(f"model folder {source}: its {what} cannot be read")
    unread = f"model.path={source} is not a folder here, and its {what} could not be fetched from the hub"
    advice = "; give a folder (scripts/get_smollm2.sh makes one) or another id (for grpo export, pass --base=<folder>)"
    return explained(unread, advice)
