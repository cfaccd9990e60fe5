"""What a person may say to vLLM's own constructor (`engine.options`), and what is refused with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_cli.engine.vllm.process import guest
from grpo_cli.support.errors import UserError, closest

_OURS = (
    "model dtype seed max_num_seqs kv_cache_memory_bytes gpu_memory_utilization enforce_eager enable_prefix_caching "
    "enable_sleep_mode load_format skip_tokenizer_init max_model_len block_size"
).split()
_BIASING = {
    "logprobs_mode": "log-probabilities must be those of the distribution that was drawn from (processed)",
    "logits_processors": "the policy would not be what was sampled from",
    "generation_config": "a model's own penalties and truncation would change what is sampled from",
    "override_generation_config": "penalties and truncation would change what is sampled from",
    "kv_cache_dtype": "a rounded KV cache would make another sampler than the policy",
    "quantization": "rounded weights would make another sampler than the policy",
    "speculative_config": "its acceptance rule has not been tested to keep the policy's distribution",
    "watermark_config": "marked text is drawn from another distribution than the policy's",
    "hf_overrides": "the model in training would not be the one that is sampled from",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what is ours to say, what would bias the ratio, and what vLLM does not know."""
    for word, value in options.items():
        if word in _OURS:
            raise UserError(f"engine.options.{word} is set by this engine itself; see conf/engine/vllm.yaml")
        if word in _BIASING:
            raise UserError(f"engine.options.{word}={value} would bias the importance ratio: {_BIASING[word]}")
    if not options:
        return
    with guest():
        from vllm.engine.arg_utils import EngineArgs
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for word in options:
        if word not in known:
            raise UserError(f"engine.options.{word} is no word of vLLM's LLM{closest(word, known)}")
