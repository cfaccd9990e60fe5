"""Tiny random models of families that are not Llama-shaped, and folders of them with the embedded tokenizer."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    JambaConfig,
    MambaConfig,
    OPTConfig,
    PhiConfig,
    RecurrentGemmaConfig,
)

SIZES: dict[str, Any] = dict(vocab_size=258, hidden_size=32, num_hidden_layers=2, pad_token_id=0, eos_token_id=1)
HEADS: dict[str, Any] = dict(SIZES, bos_token_id=1, num_attention_heads=4, intermediate_size=48)
CONFIGS: dict[str, Any] = {
    # caps its logits, and half of its layers forget what is 6 tokens ago
    "gemma2": lambda: Gemma2Config(**HEADS, num_key_value_heads=2, head_dim=8, sliding_window=6),
    "gpt2": lambda: GPT2Config(**HEADS, n_positions=256, resid_pdrop=0.3),
    "phi": lambda: PhiConfig(**HEADS, resid_pdrop=0.3, max_position_embeddings=256),
    "opt": lambda: OPTConfig(
        **{k: v for k, v in HEADS.items() if k != "intermediate_size"},
        ffn_dim=48,
        word_embed_proj_dim=32,
        max_position_embeddings=256,
        dropout=0.3,
        layerdrop=0.5,
    ),
    "mamba": lambda: MambaConfig(**SIZES, state_size=4),
    "jamba": lambda: JambaConfig(  # a layer of Mamba, one of attention with experts
        **HEADS,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    # its prompts cannot be padded
    "recurrent_gemma": lambda: RecurrentGemmaConfig(
        **HEADS, num_key_value_heads=1, attention_window_size=16, block_types=["recurrent", "attention"]
    ),
    "bert": lambda: BertConfig(**HEADS),  # an encoder
}


def letters(reply: str) -> float:
    """A reward that random replies differ in."""
    return float(sum(map(ord, reply)) % 7)


def foreign_model(family: str, seed: int = 0) -> Any:
    """Float32, in evaluation mode, every weight random so that leaving one out shows."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[family]())
        for weight in model.parameters():
            weight += torch.randn_like(weight) * 0.1
    return model.eval()


def foreign_folder(folder: Path, family: str) -> Path:
    foreign_model(family).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(files("grpo_cli.model") / "tiny")).save_pretrained(folder)
    return folder
