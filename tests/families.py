"""Tiny random models of families that are not Llama-shaped, and folders of them with the embedded tokenizer."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SIZES: dict[str, Any] = dict(vocab_size=258, hidden_size=32, num_hidden_layers=2, pad_token_id=0, eos_token_id=1)
ATTENTION = SIZES | dict(bos_token_id=1, num_attention_heads=4)
HEADS = ATTENTION | dict(intermediate_size=48)
OPT = ATTENTION | dict(ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=256, dropout=0.3, layerdrop=0.5)
# A layer of Mamba, one of attention with experts.
JAMBA = HEADS | dict(num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2)
JAMBA |= dict(expert_layer_offset=1, num_experts=2, mamba_d_state=4, use_mamba_kernels=False)
RECURRENT = HEADS | dict(num_key_value_heads=1, attention_window_size=16, block_types=["recurrent", "attention"])
CONFIGS: dict[str, dict[str, Any]] = {
    # caps its logits, and half of its layers forget what is 6 tokens ago
    "gemma2": HEADS | dict(num_key_value_heads=2, head_dim=8, sliding_window=6),
    "gpt2": HEADS | dict(n_positions=256, resid_pdrop=0.3),
    "phi": HEADS | dict(resid_pdrop=0.3, max_position_embeddings=256),
    "opt": OPT,
    "mamba": SIZES | dict(state_size=4),
    "jamba": JAMBA,
    "recurrent_gemma": RECURRENT,  # its prompts cannot be padded
    "bert": HEADS,  # an encoder
}


def letters(reply: str) -> float:
    """A reward that random replies differ in."""
    return float(sum(map(ord, reply)) % 7)


def foreign_model(family: str, seed: int = 0) -> Any:
    """Float32, in evaluation mode, every weight random so that leaving one out shows."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONFIGS[family]))
        for weight in model.parameters():
            weight += torch.randn_like(weight) * 0.1
    return model.eval()


def foreign_folder(folder: Path, family: str) -> Path:
    foreign_model(family).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(files("grpo_cli.model") / "tiny")).save_pretrained(folder)
    return folder
