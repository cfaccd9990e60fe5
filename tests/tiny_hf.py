"""Small randomly initialised Hugging Face folders with a real tokenizer, made in a fraction of a second for tests.

Not a good model of anything: every parameter is random, biases and norms included, so that leaving one out shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
PAD, END, TURN_START, TURN_END, BEGIN = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, chat_template: bool | str = False) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, as `AutoTokenizer` gives every Qwen2 folder, whatever the folder says.

    The ids begin with pad 0, end of text 1, turn start 2, turn end 3, begin of text 4. A reply ends with the end of
    text, or with the turn end when there is a chat template (a string is a template of one's own).
    """
    special = [PAD, END, TURN_START, TURN_END, BEGIN]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(byte_level.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    words: dict[str, Any] = {"pad_token": PAD, "additional_special_tokens": [TURN_START, TURN_END, END]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURN_END if chat_template else END, **words)
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE if chat_template is True else chat_template
    return fast


def make_folder(path: Path, family: str = "qwen2", *, chat_template: bool = False, **config: Any) -> Path:
    """Write model and tokenizer to `path` and return it. `config` goes to the family's config as it is."""
    tokens = make_tokenizer(chat_template=chat_template)
    ids = {f"{name}_token_id": getattr(tokens, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    random_model(family, vocab_size=len(tokens), **ids, **config).save_pretrained(path)
    tokens.save_pretrained(path)
    return path


def random_model(family: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Weights of a size that makes the logits differ, norms near one, biases that are not zero."""
    settings: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, head_dim=8, tie_word_embeddings=True)
    settings |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    settings |= dict(sliding_window=None) if family == "mistral" else {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(settings | config)))
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.2)
            else:
                nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model
