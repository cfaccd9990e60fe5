"""Drawing tokens: from the distribution that is said, by the row's own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import require_c

from grpo_cli.engine.sampling import RowSampling, _truncated, draw, inverse, row_sampling, truncate, uniforms
from grpo_cli.settings import Sampling

INF = torch.inf
WAYS = pytest.mark.parametrize("way", ["PyTorch", "C"])


def table(way: str, *words: Sampling) -> RowSampling:
    require_c("decode") if way == "C" else None
    return row_sampling(words, torch.device("cpu"), way == "C")


E, QUARTERS = 2**-53, [0.0, 0.25 - 2**-53, 0.25, 0.5 - 2**-53, 0.5, 0.75 - 2**-53, 0.75, 1 - 2**-53]


@WAYS
@pytest.mark.parametrize(
    ("logits", "uniform", "tokens", "shares"),
    [
        # The borders are at 0.5 and 0.75, and the third token never comes.
        (torch.tensor([0.5, 0.25, 0.0, 0.25]).log(), [0.0, 0.49, 0.51, 0.74, 0.76, 1 - E], [0, 0, 1, 1, 3, 3],
         [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]),
        # A number on a border belongs to the token above it, and none to a token whose share is empty.
        (torch.tensor([-INF, 0.0, -INF, 0.0, -INF]), [0.0, 0.5 - E, 0.5, 1 - E], [1, 1, 3, 3], [0.5] * 4),
        # 600 tokens are two blocks and a rest: 100, 255, 256 and 590 have a quarter each.
        (torch.full((600,), -INF).index_fill(0, torch.tensor([100, 255, 256, 590]), 0.0), QUARTERS,
         [100, 100, 255, 255, 256, 256, 590, 590], [0.25] * 8),
    ],
)  # fmt: skip
def test_each_token_comes_out_for_its_own_share_of_the_unit_interval(
    way: str, logits: torch.Tensor, uniform: list[float], tokens: list[int], shares: list[float]
) -> None:
    rows, by = logits.expand(len(uniform), -1), table(way, *[Sampling.plain(128)] * len(uniform))
    found, logprobs = draw(rows, torch.tensor(uniform, dtype=torch.float64), by)
    assert found.tolist() == tokens
    torch.testing.assert_close(logprobs.exp(), torch.tensor(shares))


@WAYS
def test_a_row_draws_the_same_in_any_company_and_precision(way: str) -> None:
    """Compared with a sum over all tokens in float64. Of these 70 rows a few are converted from bfloat16 at a time."""
    uniform = torch.from_numpy(uniforms([5], 70)[0])
    for dtype in (torch.float32, torch.bfloat16):
        logits = (3.0 * torch.randn(70, 20_000, generator=torch.Generator().manual_seed(0))).to(dtype)
        tokens, _ = draw(logits, uniform, table(way, *[Sampling.plain(128)] * 70))
        sums = logits.double().softmax(-1).cumsum(-1)
        assert torch.equal(tokens, torch.searchsorted(sums, uniform[:, None], right=True).squeeze(-1))
        words = [replace(Sampling.plain(128, temperature=t), top_p=p) for t in (1.0, 0.0, 0.7) for p in (1.0, 0.8)]
        for kinds in (words[::2], words):  # nothing truncated, and some
            by = table(way, *[kinds[row % len(kinds)] for row in range(70)])
            tokens, logprobs = draw(logits, uniform, by)
            assert (logprobs == 0).any() and torch.isfinite(logprobs).all()
            for count in (1, 2, 13, 39, 69):
                few = draw(logits[:count], uniform[:count], by.of(slice(count)))
                assert torch.equal(few[0], tokens[:count]) and torch.equal(few[1], logprobs[:count])


def test_what_is_rounded_up_to_a_whole_block_does_not_fall_to_a_token_without_probability() -> None:
    """In units of 2^-53 token 0 has 1.5 and token 256 has p = 2^53 - 2^29. Their sum, p + 1.5, is rounded to p + 2, the
    number to p + 1, and less the 1.5 both are p: the number seems to lie at the very end of its block."""
    probabilities = torch.zeros(1, 600)
    probabilities[0, 0], probabilities[0, 256] = 1.5 * 2**-53, 1 - 2**-24
    assert inverse(probabilities, torch.tensor([[1 - 2**-53]], dtype=torch.float64)).tolist() == [[256]]


def test_top_k_and_top_p_renormalise_what_is_left() -> None:
    """Of 0.4, 0.3, 0.2, 0.1. top-k 2: {0, 1}; top-p 0.6: the smallest set that reaches it, {0, 1}; both: 3 left, then
    0.4 + 0.3 of 0.9 < 0.8."""
    words = [replace(Sampling.plain(128), **cut) for cut in ({"top_k": 2}, {"top_p": 0.6}, {"top_p": 0.8, "top_k": 3})]
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(3, 4)
    tokens, logprobs = draw(logits, torch.full((3,), 0.99, dtype=torch.float64), table("PyTorch", *words))
    assert tokens.tolist() == [1, 1, 2]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([3 / 7, 3 / 7, 2 / 9]))


@pytest.mark.parametrize(("top_p", "top_k"), [(0.3, 0), (0.9, 3), (0.999, 300), (0.9, 900), (1.0, 900)])
def test_a_row_that_is_not_sorted_as_a_whole_keeps_the_same(top_p: float, top_k: int) -> None:
    """Some sets end among the first 256 tokens, others do not; which ones is no matter of who else is there."""
    scale = torch.tensor([0.1, 1.0, 3.0, 8.0])[:, None]
    logits = scale * torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    words = torch.full((4,), top_p), torch.full((4,), top_k)
    found = truncate(logits, *words)
    assert torch.equal(found, _truncated(logits, *words))
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(truncate(logits[one], words[0][one], words[1][one]), found[one])


def test_a_request_s_numbers_are_splitmix64s_whatever_others_there_are() -> None:
    """The reference implementation's first outputs for seed 1234567, as 53-bit fractions."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert uniforms([5, 1234567], 4)[1].tolist() == [(value >> 11) * 2.0**-53 for value in published]
