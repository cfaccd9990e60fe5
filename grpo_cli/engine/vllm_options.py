"""Which arguments of vLLM's constructor a user may set (`engine.options`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_cli.engine.vllm_process import guest
from grpo_cli.support.errors import UserError, closest

_OURS = (
    "model dtype seed max_num_seqs kv_cache_memory_bytes gpu_memory_utilization enforce_eager enable_prefix_caching "
    "enable_sleep_mode load_format skip_tokenizer_init max_model_len block_size"
).split()
# Options with which the sampler, or its log-probabilities, would not be the policy's distribution.
_BIASING = (
    "logprobs_mode logits_processors generation_config override_generation_config kv_cache_dtype quantization "
    "speculative_config watermark_config hf_overrides"
).split()


def check_options(options: Mapping[str, Any]) -> None:
    """UserError for what this engine sets itself, what would bias the importance ratio, and what vLLM does not know."""
    for word, value in options.items():
        if word in _OURS:
            raise UserError(f"engine.options.{word} is set by this engine itself; see conf/engine/vllm.yaml")
        if word in _BIASING:
            raise UserError(
                f"engine.options.{word}={value} would bias the importance ratio: tokens must be drawn from the policy "
                "itself, and their log-probabilities be those of what was drawn from; leave it out"
            )
    if not options:
        return
    with guest():
        from vllm.engine.arg_utils import EngineArgs
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for word in options:
        if word not in known:
            raise UserError(f"engine.options.{word} is no argument of vLLM's LLM{closest(word, known)}")
