"""The two halves of a Hugging Face causal language model, whatever wraps it: the backbone and the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def unwrapped(model: Any) -> Any:
    """The causal language model inside a PEFT wrapper, whose layers PEFT has replaced in place; else the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(model: Any) -> Any:
    """Token ids to last hidden states."""
    return unwrapped(model).model


def head(model: Any) -> Any:
    """Hidden states to logits."""
    return unwrapped(model).lm_head


def place_of(model: Any) -> torch.device:
    """Where its computation takes place."""
    place: torch.device = next(model.parameters()).device
    return place


def has_dropout(model: Any) -> bool:
    """Whether a pass in train mode leaves numbers out at random, and so differs from one in eval mode."""
    return any(isinstance(module, _DROPOUTS) and module.p > 0 for module in model.modules())
