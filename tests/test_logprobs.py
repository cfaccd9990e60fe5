"""Chunked log-probabilities are the plain ones, forward and backward, and the full logits are never built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import VOCABULARY, small_model, token_logprobs
from torch.utils._python_dispatch import TorchDispatchMode


def some_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (3, 12), generator=generator)
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, 4:12] = mask[1, 2:7] = mask[2, 6:9] = True
    return ids, mask


def plain(model: Any, ids: torch.Tensor, mask: torch.Tensor, temperature: float) -> torch.Tensor:
    logprobs = (model(ids).logits[:, :-1].float() / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(len(ids), 1), chosen], dim=1) * mask


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (5, 0.7), (16, 0.7), (1000, 1.0)])
def test_values_and_gradients_equal_the_plain_computation(chunk: int, temperature: float) -> None:
    """Also of rows that are padded further on the right."""
    ids, mask = some_rows()
    longer = torch.cat([ids, torch.zeros(3, 5, dtype=torch.long)], dim=1)
    weights = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    gradients = []
    for compute in (
        lambda model: token_logprobs(model, longer, F.pad(mask, (0, 5)), temperature, chunk)[:, :12],
        lambda model: plain(model, ids, mask, temperature),
    ):
        model = small_model(tie_word_embeddings=False)
        values = compute(model)
        (values * weights).sum().backward()
        gradients.append((values.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(gradients[0][0], gradients[1][0], atol=1e-5, rtol=1e-5)
    for name, gradient in gradients[0][1].items():
        torch.testing.assert_close(gradient, gradients[1][1][name], atol=2e-5, rtol=1e-4, msg=name)


class LargestLogits(TorchDispatchMode):
    """Remembers the most elements of any tensor as wide as the vocabulary, the head's weights (32 hidden) aside."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (97,) and tensor.shape != (32, 97):
                self.most = max(self.most, tensor.numel())
        return result


def test_no_more_than_a_chunk_of_logits_exists_forward_or_backward() -> None:
    model = small_model(vocab_size=97, tie_word_embeddings=False)
    ids, mask = some_rows()
    with LargestLogits() as seen:
        token_logprobs(model, ids, mask, 1.0, chunk=4).sum().backward()
    assert 0 < seen.most <= 4 * 97 * 1
    with LargestLogits() as seen:
        plain(model, ids, mask, 1.0).sum().backward()
    assert seen.most == 3 * 12 * 97


def test_logits_in_half_precision_are_normalised_in_float32() -> None:
    """Log-probabilities of 1000 equal tokens: bfloat16 would give -6.90625, float32 -6.907755."""
    model = small_model(vocab_size=1000, tie_word_embeddings=False).bfloat16()
    model.lm_head.weight.data.zero_()
    ids, mask = some_rows()
    with torch.no_grad():
        values = token_logprobs(model, ids, mask, 1.0, 5)
    assert values.dtype == torch.float32
    assert values[mask].tolist() == pytest.approx([-6.907755] * int(mask.sum()), abs=1e-6)
