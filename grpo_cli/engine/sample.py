"""Logits to tokens, with the exact log-probability of each under the distribution that it was drawn from.

A row's randomness is a table of uniforms from a counter-based generator keyed by the request's seed: entry t decides
token t, whoever the row's neighbours are, and one batched operation draws for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.settings import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Tokens whose probabilities are added up before the float64 sums begin: about the square root of a vocabulary.
BLOCK = 256
# Logits of less than float32 that a CPU takes to float32 at a time: what lies in a core's cache. With all of them at
# once, each step's copy was fresh memory, and drawing took four times as long.
_AT_ONCE = 1 << 19


def uniforms(seeds: Sequence[int], count: int) -> Float[Tensor, "R {count}"]:
    """Numbers in [0, 1), float64, on the CPU: row i holds the first `count` of the stream of 64-bit seed i.

    SplitMix64 (Steele, Lea and Flood 2014): number t of a stream is a hash of `seed + t * golden ratio`, so all of all
    rows are made at once, in any order. 53 bits of each are used.
    """
    state = np.array(seeds, dtype=np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)) * 2.0**-53)


class SamplingTable:
    """The sampling settings of each slot as tensors, and as much as the host must know to skip what no row asks for."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._words: list[Sampling | None] = [None] * slots
        self.temperature = torch.ones(slots, device=device)
        self.top_p = torch.ones(slots, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.long, device=device)
        self._summarise()

    def put(self, slots: Sequence[int], settings: Sequence[Sampling]) -> None:
        """Set the rows at `slots`; costs nothing when nothing changes."""
        if all(self._words[slot] == new for slot, new in zip(slots, settings, strict=True)):
            return
        for slot, new in zip(slots, settings, strict=True):
            self._words[slot] = new
        index = torch.tensor(slots, device=self.temperature.device)
        self.temperature[index] = torch.tensor([one.temperature for one in settings], device=index.device)
        self.top_p[index] = torch.tensor([one.top_p for one in settings], device=index.device)
        self.top_k[index] = torch.tensor([one.top_k for one in settings], device=index.device)
        self._summarise()

    def move(self, source: int, target: int) -> None:
        words = self._words[source]
        assert words is not None, "only a slot that is taken is moved"
        self.put([target], [words])

    def _summarise(self) -> None:
        words = [words for words in self._words if words is not None]
        self.any_tempered = any(w.temperature != 1.0 for w in words)
        self.any_greedy = any(w.temperature == 0.0 for w in words)
        self.all_greedy = self.any_greedy and all(w.temperature == 0.0 for w in words)
        self.any_truncated = any(w.truncated for w in words)

    def draw(
        self, logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], rows: Int[Tensor, "R"] | slice
    ) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
        """One token per row and its log-probability, float32; `rows` says which slots the rows belong to.

        A greedy row draws from a point mass, so its log-probability is 0.
        """
        few = max(1, _AT_ONCE // logits.shape[1])
        if logits.dtype == torch.float32 or logits.device.type != "cpu" or len(logits) <= few:
            return self._draw(logits.float(), uniform, rows)
        places = torch.arange(len(self._words))[rows].split(few)
        parts = [
            self._draw(x.float(), u, r) for x, u, r in zip(logits.split(few), uniform.split(few), places, strict=True)
        ]
        tokens, logprobs = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)

    def _draw(
        self, logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], rows: Int[Tensor, "R"] | slice
    ) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
        if self.all_greedy:
            return logits.argmax(-1), logits.new_zeros(logits.shape[0])
        scaled = logits
        if self.any_tempered:
            temperature = self.temperature[rows]
            scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        if self.any_truncated:
            scaled = truncate(scaled, self.top_p[rows], self.top_k[rows])
        probabilities = torch.softmax(scaled, dim=-1)
        tokens = inverse(probabilities, uniform[:, None])
        chosen = probabilities.gather(-1, tokens).log_().squeeze(-1)
        tokens = tokens.squeeze(-1)
        if self.any_greedy:
            greedy = self.temperature[rows] == 0
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
            chosen = torch.where(greedy, torch.zeros_like(chosen), chosen)
        return tokens, chosen


def inverse(probabilities: Float[Tensor, "R V"], uniform: Float[Tensor, "R 1"]) -> Int[Tensor, "R 1"]:
    """The token in whose share of the unit interval, laid out token after token, the number lies.

    A token of probability zero cannot come out, and 2^-53 is the smallest probability that can. Blocks of tokens are
    summed first, then the one block in which the number lies is: float64 over every token took several times as long.
    """
    vocabulary = probabilities.shape[-1]
    size = min(BLOCK, vocabulary)
    whole = vocabulary // size * size
    blocks = probabilities[:, :whole].unflatten(-1, (-1, size)).sum(-1)
    rest = probabilities[:, whole:].sum(-1, keepdim=True)
    sums = torch.cat([blocks, rest], dim=-1).double().cumsum_(-1)
    threshold = uniform * sums[:, -1:]
    # `right=True`: the first block, or token, whose sum exceeds the threshold, never one of probability 0. A number
    # that is none (of logits that are not finite) is beyond all.
    block = torch.searchsorted(sums, threshold, right=True).clamp_(max=sums.shape[-1] - 1)
    below = torch.where(block > 0, sums.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    places = block * size + torch.arange(size, device=block.device)
    own = probabilities.gather(-1, places.clamp(max=vocabulary - 1)).double()
    inside = own.masked_fill_(places >= vocabulary, 0.0).cumsum_(-1)
    share = (threshold - below) / (sums.gather(-1, block) - below)
    # The block's two sums differ in rounding; where the share is rounded up to 1 it is the largest number below.
    threshold = share.clamp_(max=1 - 2**-53) * inside[:, -1:]
    token = block * size + torch.searchsorted(inside, threshold, right=True)
    return token.clamp_(max=vocabulary - 1)


def truncate(logits: Float[Tensor, "R V"], top_p: Float[Tensor, "R"], top_k: Int[Tensor, "R"]) -> Float[Tensor, "R V"]:
    """Logits with everything outside each row's top-k and nucleus set to -inf (top-k first, as in Holtzman et al. 2020
    combined the usual way). The most probable token always stays."""
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    outside = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    ordered = ordered.masked_fill(outside, -torch.inf)
    probabilities = ordered.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    outside = outside | ((before >= top_p[:, None]) & (rank > 0) & (top_p[:, None] < 1.0))
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
