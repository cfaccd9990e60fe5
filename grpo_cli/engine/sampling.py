"""Logits to tokens, with the exact log-probability of each under the distribution that it was drawn from.

A row's randomness is a table of uniforms from a counter-based generator keyed by the request's seed: entry t decides
token t, whatever the row's neighbours, and one batched operation draws for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_cli.model.transfer import send
from grpo_cli.native import ops
from grpo_cli.settings import Sampling

GOLDEN = 0x9E3779B97F4A7C15  # of splitmix64
# Tokens whose probabilities are summed before the float64 sums begin: about the square root of a vocabulary.
BLOCK = 256
# How many lower-precision logits a CPU converts to float32 at a time: as many as fit a core's cache. Converting all at
# once allocated fresh memory in each step, and drawing took four times as long.
_AT_ONCE = 1 << 19

# How many of the most probable tokens a CPU looks at before it sorts them all, which takes many times as long.
FIRST = 256


@dataclass(frozen=True)
class RowSampling:
    """The sampling settings of each row, and what no row needs. `natively`: draw in C where nothing is truncated."""

    temperature: Float[Tensor, "R"]
    top_p: Float[Tensor, "R"]
    top_k: Int[Tensor, "R"]
    tempered: bool
    greedy: bool
    all_greedy: bool
    truncated: bool
    natively: bool = False

    @property
    def flags(self) -> tuple[bool, ...]:
        return self.tempered, self.greedy, self.all_greedy, self.truncated

    def of(self, rows: slice) -> RowSampling:
        """Return the settings of some rows."""
        return replace(self, temperature=self.temperature[rows], top_p=self.top_p[rows], top_k=self.top_k[rows])


def uniforms(seeds: Sequence[int], count: int) -> np.ndarray:
    """Return numbers in [0, 1), float64, [rows, count]: row i holds the first `count` of the stream of 64-bit seed i.

    SplitMix64 (Steele, Lea and Flood 2014): number t of a stream is a hash of `seed + t * golden ratio`, so the numbers
    of all rows are computed at once. 53 bits of each are used.
    """
    state = np.array(seeds, dtype=np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)) * 2.0**-53


def row_sampling(settings: Sequence[Sampling], device: torch.device, natively: bool = False) -> RowSampling:
    """Return the sampling of rows with these settings."""
    words = np.array([(s.temperature, s.top_p, s.top_k) for s in settings], dtype=np.float64).T
    temperature, top_p, top_k = send(device, *np.ascontiguousarray(words))
    greedy = words[0] == 0.0
    flags = bool((words[0] != 1.0).any()), bool(greedy.any()), bool(greedy.all())
    truncated = bool(((words[1] < 1.0) | (words[2] > 0)).any())
    return RowSampling(temperature.float(), top_p.float(), top_k.long(), *flags, truncated, natively)


def draw(logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], by: RowSampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row; return them with their log-probabilities, float32, which are 0 in greedy rows."""
    if by.natively and not by.truncated:
        return ops.draw(logits, uniform, by.temperature)
    few = rows_at_once(logits.shape[1])
    if logits.device.type != "cpu" or len(logits) <= few:
        return _draw(logits.float(), uniform, by)
    parts = (slice(at, at + few) for at in range(0, len(logits), few))
    drawn = [_draw(logits[part].float(), uniform[part], by.of(part)) for part in parts]
    tokens, chosen = map(torch.cat, zip(*drawn, strict=True))
    return tokens, chosen


def _draw(logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], by: RowSampling) -> tuple[Tensor, Tensor]:
    if by.all_greedy:
        return logits.argmax(-1), logits.new_zeros(logits.shape[0])
    scaled = logits
    if by.tempered:
        scaled = logits / torch.where(by.temperature > 0, by.temperature, 1.0)[:, None]
    if by.truncated:
        scaled = truncate(scaled, by.top_p, by.top_k)
    probabilities = torch.softmax(scaled, dim=-1)
    tokens = inverse(probabilities, uniform[:, None])
    chosen = probabilities.gather(-1, tokens).log_().squeeze(-1)
    tokens = tokens.squeeze(-1)
    if by.greedy:
        greedy = by.temperature == 0
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
        chosen = torch.where(greedy, torch.zeros_like(chosen), chosen)
    return tokens, chosen


def rows_at_once(vocabulary: int) -> int:
    """Return how many rows of lower-precision logits a CPU converts and samples from together."""
    return max(1, _AT_ONCE // vocabulary)


def inverse(probabilities: Float[Tensor, "R V"], uniform: Float[Tensor, "R 1"]) -> Int[Tensor, "R 1"]:
    """Return tokens by inverse sampling: a number lies in its token's part of [0, 1).

    A token of probability zero is never drawn, and 2^-53 is the smallest probability that can be. First blocks of
    tokens are summed, then the tokens of the block in which the number lies: float64 sums over every token took several
    times as long.
    """
    vocabulary = probabilities.shape[-1]
    size = min(BLOCK, vocabulary)
    whole = vocabulary // size * size
    blocks = probabilities[:, :whole].unflatten(-1, (-1, size)).sum(-1)
    rest = probabilities[:, whole:].sum(-1, keepdim=True)
    sums = torch.cat([blocks, rest], dim=-1).double().cumsum_(-1)
    threshold = uniform * sums[:, -1:]
    # `right=True`: the first block, or token, whose sum exceeds the threshold, never one of probability 0. NaN (from
    # logits that are not finite) sorts last.
    block = torch.searchsorted(sums, threshold, right=True).clamp_(max=sums.shape[-1] - 1)
    below = torch.where(block > 0, sums.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    places = block * size + torch.arange(size, device=block.device)
    own = probabilities.gather(-1, places.clamp(max=vocabulary - 1)).double()
    inside = own.masked_fill_(places >= vocabulary, 0.0).cumsum_(-1)
    share = (threshold - below) / (sums.gather(-1, block) - below)
    # The block's two sums differ in rounding; a share rounded up to 1 becomes the largest number below.
    threshold = share.clamp_(max=1 - 2**-53) * inside[:, -1:]
    token = block * size + torch.searchsorted(inside, threshold, right=True)
    return token.clamp_(max=vocabulary - 1)


def truncate(logits: Float[Tensor, "R V"], top_p: Float[Tensor, "R"], top_k: Int[Tensor, "R"]) -> Float[Tensor, "R V"]:
    """Return logits with -inf outside each row's top-k and nucleus (top-k first; Holtzman et al. 2020). The most
    probable token always stays.

    On a CPU a row is sorted as a whole only if its set may not end among the first tokens; a GPU would wait for that
    answer, and the tensors of a plan have none."""
    if type(logits) is not Tensor or logits.device.type != "cpu" or logits.shape[1] <= FIRST:
        return _truncated(logits, top_p, top_k)
    first, order = logits.topk(FIRST)
    outside = (top_k[:, None] > 0) & (torch.arange(FIRST) >= top_k[:, None])
    first = first.masked_fill(outside, -torch.inf)
    of_all = torch.where(top_k > 0, first.double().logsumexp(-1), logits.double().logsumexp(-1))
    outside |= _beyond((first.double() - of_all[:, None]).exp(), top_p)
    kept = torch.full_like(logits, -torch.inf).scatter_(1, order, first.masked_fill(outside, -torch.inf))
    longer = (~outside[:, -1] | (top_k > FIRST)).nonzero()[:, 0]
    kept[longer] = _truncated(logits[longer], top_p[longer], top_k[longer])
    return kept


def _beyond(probabilities: Float[Tensor, "R N"], top_p: Float[Tensor, "R"]) -> Bool[Tensor, "R N"]:
    """Mark the tokens, the most probable first, that come after those that reach top_p."""
    before = probabilities.cumsum(-1) - probabilities
    later = torch.arange(probabilities.shape[1], device=probabilities.device) > 0
    return (before >= top_p[:, None]) & later & (top_p[:, None] < 1.0)


def _truncated(
    logits: Float[Tensor, "R V"], top_p: Float[Tensor, "R"], top_k: Int[Tensor, "R"]
) -> Float[Tensor, "R V"]:
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    outside = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    ordered = ordered.masked_fill(outside, -torch.inf)
    outside = outside | _beyond(ordered.double().softmax(-1), top_p)
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
