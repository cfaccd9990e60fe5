"""The two halves of a Hugging Face causal language model, whatever wraps it: the backbone and the head."""

from __future__ import annotations

from typing import Any


def unwrapped(model: Any) -> Any:
    """The causal language model inside a PEFT wrapper, whose layers PEFT has replaced in place; else the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(model: Any) -> Any:
    """Token ids to last hidden states."""
    return unwrapped(model).model


def head(model: Any) -> Any:
    """Hidden states to logits."""
    return unwrapped(model).lm_head
