"""Small randomly initialised Hugging Face folders with a real tokenizer, made in a fraction of a second for tests.

Not a good model of anything: every parameter is random, biases and norms included, so that leaving one out shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# Llama 3's scaling, at a length that small models pass.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: Mapping[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
PAD, END, TURN_START, TURN_END, BEGIN = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, chat_template: bool | str = False, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, as `AutoTokenizer` gives every Qwen2 folder, whatever the folder says.

    The ids begin with pad 0, end of text 1, turn start 2, turn end 3, begin of text 4. A reply ends with the end of
    text, or with the turn end when there is a chat template (a string is a template of one's own). `add_bos` puts the
    begin of text before every plainly encoded text, as Llama's tokenizer does.
    """
    special = [PAD, END, TURN_START, TURN_END, BEGIN]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(byte_level.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, special.index(BEGIN))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END if chat_template else END,
        bos_token=BEGIN if add_bos else None,
        additional_special_tokens=[TURN_START, TURN_END, END],
    )
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE if chat_template is True else chat_template
    return fast


def make_folder(
    path: Path, family: str = "qwen2", *, chat_template: bool = False, tie: bool = True, hidden: int = 32, **config: Any
) -> Path:
    """Write model and tokenizer to `path` and return it. `config` goes to the family's config as it is."""
    tokens, (config_class, model_class) = make_tokenizer(chat_template=chat_template), FAMILIES[family]
    settings = dict(
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
        bos_token_id=tokens.bos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**(settings | config)))
        _randomise(model)
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return path


def _randomise(model: nn.Module) -> None:
    """Weights of a size that makes the logits differ, norms near one, biases that are not zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.2)
            else:
                nn.init.normal_(parameter, mean=1.0, std=0.2)
