"""AdamW in three forms: PyTorch's, bitsandbytes' with 8-bit state, PyTorch's with state in host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_cli.settings import OptimSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import require


def make_optimizer(weights: Sequence[Tensor], optim: OptimSettings) -> Any:
    """Return the optimizer of `weights`. UserError for 8-bit state without bitsandbytes or a GPU of CUDA.

    Weight decay acts on weights of two or more dimensions: matrices, embeddings, adapters. Norms and biases do not
    decay, by the convention of nanoGPT's `configure_optimizers` and of transformers' Trainer.
    """
    kwargs: dict[str, Any] = dict(lr=optim.lr, betas=optim.betas, eps=optim.eps)
    if optim.name == "adamw8bit":
        if (kind := weights[0].device.type) != "cuda":
            raise UserError(f"optim.name=adamw8bit needs a CUDA GPU, but the device is {kind}; use optim.name=adamw")
        require("bitsandbytes", "optim.name=adamw8bit")
        from bitsandbytes.optim import AdamW8bit

        # state of 8 bits in blocks, 2 bytes per weight instead of 8 (Dettmers et al., arXiv 2110.02861)
        return AdamW8bit(_groups(weights, optim.weight_decay), **kwargs)
    if optim.offload:
        return Offloaded(weights, optim.weight_decay, kwargs)
    return torch.optim.AdamW(_groups(weights, optim.weight_decay), fused=True, **kwargs)


def _groups(weights: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return weights with decay, then those without; empty groups are left out."""
    decaying, others = [w for w in weights if w.dim() >= 2], [w for w in weights if w.dim() < 2]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def require_finite_weights(weights: Sequence[Tensor], optim: OptimSettings, step: int, rate: float) -> None:
    """Raise UserError if the update of `step` (from 0) has left a weight that is not finite, or whose square is not.

    Every weight is read once: 4 bytes of each, where AdamW itself reads and writes 28.
    """
    if not math.isfinite(torch.nn.utils.get_total_norm(weights)):
        raise UserError(
            f"step {step + 1}: the update left weights that are not finite, which are not saved (learning rate "
            f"{rate:.3g}); resume with lower optim.lr={optim.lr} or optim.weight_decay={optim.weight_decay}"
        )


def state_by_name(optimizer: Any, names: Sequence[str], weights: Sequence[Tensor]) -> dict[str, Any]:
    """Return its state_dict, in which the names of its `weights` stand for PyTorch's numbers."""
    state: dict[str, Any] = optimizer.state_dict()
    order = _order(optimizer, names, weights)
    state["state"] = {order[number]: averages for number, averages in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [order[number] for number in group["params"]]
    return state


def _order(optimizer: Any, names: Sequence[str], weights: Sequence[Tensor]) -> list[str]:
    """Return the names of its weights, by PyTorch's numbers."""
    known = dict(zip(map(id, getattr(optimizer, "copies", weights)), names, strict=True))
    return [known[id(weight)] for group in optimizer.param_groups for weight in group["params"]]


def load_state(optimizer: Any, state: Mapping[str, Any], names: Sequence[str], weights: Sequence[Tensor]) -> None:
    """Restore a checkpoint's state, by the names of weights. Rate, betas, eps and decay stay those that `optimizer` was
    made with. UserError for an optimizer of other weights."""
    numbers = {name: number for number, name in enumerate(_order(optimizer, names, weights))}
    saved = {name for group in state["param_groups"] for name in group["params"]}
    sides = ((saved - numbers.keys(), "has", "does not train"), (numbers.keys() - saved, "lacks", "trains"))
    for other, has, trains in sides:
        if other:
            some = ", ".join(sorted(other)[:3]) + ", ..." * (len(other) > 3)
            raise UserError(
                f"the checkpoint's optimizer {has} {len(other)} weights that this run {trains} ({some}): "
                "resume with its model and adapters, or start anew with model.path=<checkpoint>"
            )
    found: dict[str, Any] = optimizer.state_dict()
    found["state"] = {numbers[name]: averages for name, averages in state["state"].items()}
    _check_moments(optimizer, found["state"])
    optimizer.load_state_dict(found)


def _check_moments(optimizer: Any, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError for moments of another shape than their weight's: fused kernels would read beyond their end."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    names = ["state1", "state2"] if type(optimizer).__name__ == "AdamW8bit" else ["exp_avg", "exp_avg_sq"]
    for number, averages in state.items():
        averages = averages | averages.get("__bnb_optimizer_quant_state__", {})  # where newer bitsandbytes has them
        if not averages.keys() >= {*names}:
            raise UserError("the checkpoint's optimizer is another one: leave optim.name as the run had it")
        for name in names:
            if averages[name].shape != weights[number].shape:
                raise ValueError(f"the optimizer's {name} has shape {tuple(averages[name].shape)}")
        if "exp_avg" in averages and (averages["step"].shape != () or averages["step"].dtype != torch.float32):
            raise ValueError("the optimizer's step is no number")


# Of bitsandbytes: smaller tensors keep float32 state, and a block of numbers shares a scale (2048 in older releases,
# which makes no more than 2% of a difference).
_SMALL, _BLOCK = 4096, 256


def state_bytes(weights: Sequence[Tensor], optim: OptimSettings, device: torch.device) -> int:
    """Return the bytes that the optimizer will hold on `device`, the model's, from the shapes of its weights."""
    if optim.offload and device.type != "cpu":
        return 0
    if optim.name == "adamw8bit":
        maps, counts = 2 * 256 * 4, [weight.numel() for weight in weights]  # from a byte to a number of each moment
        return maps + sum(8 * n if n < _SMALL else 2 * (n + 4 * -(-n // _BLOCK)) for n in counts)
    # Two moments in the weight's own precision, and a float32 step count.
    return sum((2 + optim.offload) * weight.untyped_storage().nbytes() + 4 for weight in weights)


class Offloaded(torch.optim.AdamW):
    """AdamW that works on copies in the CPU's memory, whose state (8 bytes per float32 weight) is there, too.

    Each step moves every gradient there and every weight back. The result is the same as without: the same numbers go
    through the same operations, on the CPU.
    """

    def __init__(self, weights: Sequence[Tensor], weight_decay: float, kwargs: Mapping[str, Any]) -> None:
        self._weights = list(weights)
        self.copies = [torch.empty_like(w, device="cpu", pin_memory=w.is_cuda).copy_(w.detach()) for w in weights]
        super().__init__(_groups(self.copies, weight_decay), fused=True, **kwargs)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for weight, copy in zip(self._weights, self.copies, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.to("cpu")
        super().step(closure)
        for weight, copy in zip(self._weights, self.copies, strict=True):
            weight.copy_(copy, non_blocking=True)
            copy.grad = None


def move_state(optimizer: Any, to_host: bool) -> None:
    """Bring the optimizer's state from a GPU to the host's memory, or back to its weights. Values keep their bits;
    state that is already in place is not touched."""
    for weight, state in optimizer.state.items():
        for name, value in [(name, value) for name, value in state.items() if isinstance(value, Tensor)]:
            if to_host and value.is_cuda:
                state[name] = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)
            elif not to_host and value.device != weight.device:
                state[name] = value.to(weight.device, non_blocking=True)
