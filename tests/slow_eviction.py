"""Eviction scores by the book, one head at a time with plain loops: what the batched ones are checked against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_cli.engine.eviction import Budget
from grpo_cli.methods.h2o import H2o
from grpo_cli.methods.rkv import Rkv
from grpo_cli.methods.snapkv import AttentionOfWindow
from grpo_cli.methods.streaming_llm import Streaming


def slow_snapkv(keys: Tensor, queries: Tensor, scale: float, kernel: int) -> list[float]:
    """keys [T, D], queries [G, W, D]."""
    group, window = queries.shape[:2]
    old = len(keys) - window
    mean = [0.0] * old
    for step in range(window):
        logits = [max(scale * float(queries[g, step] @ keys[j]) for g in range(group)) for j in range(old)]
        top = max(logits)
        exponentials = [math.exp(logit - top) for logit in logits]
        for j in range(old):
            mean[j] += exponentials[j] / sum(exponentials) / window
    reach = kernel // 2
    return [max(mean[max(0, j - reach) : j + reach + 1]) for j in range(old)]


def slow_redundancy(keys: Tensor, threshold: float) -> list[float]:
    """keys [T, D]; one number per key, the window's included."""
    count = len(keys)
    cosine = [[float(torch.cosine_similarity(a, b, dim=0)) for b in keys] for a in keys]
    for i in range(count):
        cosine[i][i] = 0.0
    for i in range(count):
        similar = [j for j in range(count) if cosine[i][j] > threshold]
        cosine[i][similar[-1] if similar else 0] = 0.0
    means = [sum(cosine[i][j] for i in range(count)) / count for j in range(count)]
    total = sum(math.exp(mean) for mean in means)
    return [math.exp(mean) / total for mean in means]


def slow_scores(
    policy: Budget, keys: Tensor, queries: Tensor, scale: float, paid: Sequence[Sequence[float]]
) -> list[float]:
    """The scores of one head: keys [T, D], queries [G, W, D]; `paid`: for each step, what it paid to each key (0 for
    keys that came later), already the mean over the group."""
    old = range(len(keys) - policy.window)
    if isinstance(policy, Streaming):
        return [float(place) for place in old]
    if isinstance(policy, H2o):
        return [sum(step[place] for step in paid) for place in old]
    assert isinstance(policy, AttentionOfWindow)
    attention = slow_snapkv(keys, queries, scale, policy.kernel)
    if not isinstance(policy, Rkv):
        return attention
    redundant = slow_redundancy(keys, policy.threshold)[: len(old)]
    return [policy.importance * a - (1 - policy.importance) * r for a, r in zip(attention, redundant, strict=True)]
