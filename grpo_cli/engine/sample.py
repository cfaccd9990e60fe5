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
    """The sampling words of each slot as tensors, and as much as the host must know to skip what no row asks for."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._words: list[Sampling] = [Sampling.plain(1)] * slots
        self.temperature = torch.ones(slots, device=device)
        self.top_p = torch.ones(slots, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.long, device=device)
        self._summarise()

    def put(self, slots: Sequence[int], words: Sequence[Sampling]) -> None:
        """Set the rows at `slots`; costs nothing when nothing changes."""
        if all(self._words[slot] == new for slot, new in zip(slots, words, strict=True)):
            return
        for slot, new in zip(slots, words, strict=True):
            self._words[slot] = new
        index = torch.tensor(slots, device=self.temperature.device)
        self.temperature[index] = torch.tensor([w.temperature for w in words], device=index.device)
        self.top_p[index] = torch.tensor([w.top_p for w in words], device=index.device)
        self.top_k[index] = torch.tensor([w.top_k for w in words], device=index.device)
        self._summarise()

    def move(self, source: int, target: int) -> None:
        self.put([target], [self._words[source]])

    def _summarise(self) -> None:
        self.any_tempered = any(w.temperature != 1.0 for w in self._words)
        self.any_greedy = any(w.temperature == 0.0 for w in self._words)
        self.any_truncated = any(w.truncated for w in self._words)

    def draw(
        self, logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], rows: Int[Tensor, "R"] | slice
    ) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
        """One token per row and its log-probability, float32; `rows` says which slots the rows belong to.

        A greedy row draws from a point mass, so its log-probability is 0. Inverse transform on a float64 cumulative
        sum: a token of probability zero cannot come out, and 2^-53 is the smallest probability that can.
        """
        logits = logits.float()
        scaled = logits
        if self.any_tempered:
            temperature = self.temperature[rows]
            scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        if self.any_truncated:
            scaled = truncate(scaled, self.top_p[rows], self.top_k[rows])
        logprobs = torch.log_softmax(scaled, dim=-1)
        cumulative = logprobs.double().exp_().cumsum_(-1)
        threshold = uniform[:, None] * cumulative[:, -1:]
        # `right=True`: the first token whose cumulative probability exceeds the threshold, never one of probability 0.
        tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)
        chosen = logprobs.gather(-1, tokens).squeeze(-1)
        tokens = tokens.squeeze(-1)
        if self.any_greedy:
            greedy = self.temperature[rows] == 0
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
            chosen = torch.where(greedy, torch.zeros_like(chosen), chosen)
        return tokens, chosen


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
