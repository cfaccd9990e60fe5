"""The learner: log-probabilities of a batch, its loss in micro-batches, one guarded optimizer step.

It knows nothing about prompts, rewards or rollouts. Only the model and the optimizer change here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.learner.batch import rows_of, to_device, tokens_of, totals
from grpo_cli.learner.forward import make_forward
from grpo_cli.learner.optimizer import load_state, make_optimizer, move_state, require_finite_weights, state_by_name
from grpo_cli.learner.schedule import effective_share, learning_rate, rate_factor
from grpo_cli.model.anatomy import has_dropout
from grpo_cli.model.transfer import send
from grpo_cli.settings import ModelSettings, OptimSettings, Sampling, TrainSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.memory import give_back_freed
from grpo_cli.support.meter import Meter
from grpo_cli.support.threads import computing_with, threads_for
from grpo_cli.types import Batch, LossOutput, Totals

LossFn = Callable[[Tensor, Batch, Totals], LossOutput]  # a `Loss`, or that of a warm-up


@dataclass(frozen=True)
class Update:
    """The result of a batch. `logprobs` are the learner's own, dropout included, from before the step.

    `fault` names what was not finite. `stepped`: the optimizer made its step, which it does not without a gradient.
    """

    metrics: Mapping[str, float]
    logprobs: Float[Tensor, "N"]
    fault: str | None
    stepped: bool


class Learner:
    """A model and the AdamW that trains it (every parameter that requires a gradient).

    `updates` counts the optimizer steps begun, including those before the checkpoint that was restored.
    """

    def __init__(
        self,
        model: Any,
        loss: LossFn,
        model_settings: ModelSettings,
        sampling: Sampling,
        train: TrainSettings,
        optim: OptimSettings,
        meter: Meter,
        warn: Callable[[str], None] = print,
    ) -> None:
        self._model, self._loss, self._train, self._optim = model, loss, train, optim
        self._max_new_tokens = sampling.max_new_tokens
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        if model_settings.adapted and (low := [name for name, w in trained.items() if w.dtype == torch.bfloat16]):
            raise UserError(f"{low[0]} would lose small updates in bfloat16: use model.dtype=float32 with it")
        self._names, self._parameters = list(trained), list(trained.values())
        self._device = self._parameters[0].device
        if optim.offload and self._device.type == "cpu":
            warn("optim.offload=true saves nothing on a CPU, and takes a copy of the trained weights: leave it out")
        self._forward = make_forward(model, model_settings, train, sampling.temperature, warn)
        self.native = self._forward.native
        self._span = meter.span
        self._autocast_word = model_settings.autocast
        self.has_dropout = has_dropout(model)  # then the passes of `update` differ from those of `logprobs`
        self.threads = threads_for(train.threads, model, most=2)
        self.updates = 0
        self.before_change: Callable[[], None] = lambda: None  # called before weights or optimizer state change
        self.before_parking: Callable[[], None] = lambda: None  # called before optimizer state moves
        self._optimizer = make_optimizer(self._parameters, optim)

    def park(self) -> None:
        """Move the optimizer's state to the host until the next update, if `optim.park` is set."""
        if self._optim.park:
            self.before_parking()
            move_state(self._optimizer, to_host=True)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision that the computation runs in, rollouts included."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast_word == "bfloat16")

    @torch.no_grad()
    def logprobs(self, model: Any, batch: Batch, with_adapters: bool = True) -> Float[Tensor, "N"]:
        """Compute log-probabilities of the batch's response tokens under `model`, or under what lies below its
        adapters, without gradient. They are on the CPU."""
        parts = [torch.tensor(rows) for rows in self._forward.cut(batch)]
        off = nullcontext() if with_adapters else model.disable_adapter()
        with self.autocast(), computing_with(self.threads), off:
            values = [self._forward.logprobs(model, rows_of(batch, rows)) for rows in parts]
        return _in_order(batch, parts, values)

    def update(self, batch: Batch, step: int, loss: LossFn | None = None, rate: float | None = None) -> Update:
        """Compute the gradients of the whole batch, then make one optimizer step, unless they are not finite or all
        exactly zero.

        Raises UserError if the step leaves a weight that is not finite; none of them is to be saved then."""
        loss, optim, sums = loss or self._loss, self._optim, dict[str, Tensor]()
        divisors, trained = totals(batch, self._max_new_tokens), int(batch.trained_mask.sum())
        parts, passes = self._micro_batches(batch, loss), list[Tensor]()
        self._model.zero_grad()
        with self._span("update") as count, computing_with(self.threads):
            for done, (rows, has_gradient) in enumerate(parts, 1):
                values, shares = self._pass(rows_of(batch, rows), loss, divisors, trained, has_gradient)
                passes.append(values)
                sums |= {name: share + sums.get(name, 0.0) for name, share in shares.items()}
                count(done, len(parts))
            with self._span("optimizer"):
                sums["optim/grad_norm"] = torch.nn.utils.clip_grad_norm_(self._parameters, optim.max_grad_norm)
                numbers = [number.detach().to(self._device).double() for number in sums.values()]
                metrics = dict(zip(sums, torch.stack(numbers).cpu().tolist(), strict=True))
                logprobs = _in_order(batch, [rows for rows, _ in parts], passes)
                if optim.ess != "none" or batch.token_ages is not None:
                    metrics["off/ess"] = effective_share(batch, logprobs)
                rate = learning_rate(optim, step, self._train.steps) if rate is None else rate
                fault, stepped = self._optimizer_step(metrics, rate, step)
        self._model.zero_grad()
        give_back_freed(all_of_it=False)
        return Update(metrics, logprobs, fault, stepped)

    def _micro_batches(self, batch: Batch, loss: LossFn) -> list[tuple[Tensor, bool]]:
        """Return the rows of each micro-batch, and whether it has a gradient: groups whose advantages are all 0 have
        none with a loss that `needs_advantage`."""
        parts = list[tuple[Tensor, bool]]()
        groups = torch.full([len(batch.prompts)], not getattr(loss, "needs_advantage", False))
        groups[batch.group[batch.any(batch.trained_mask & (batch.advantages != 0))]] = True
        for has_gradient in (True, False):
            rows = (groups[batch.group] == has_gradient).nonzero()[:, 0]
            if len(rows):
                parts += [(rows[some], has_gradient) for some in self._forward.cut(rows_of(batch, rows))]
        return parts

    def _pass(
        self, part: Batch, loss: LossFn, divisors: Totals, trained: int, has_gradient: bool
    ) -> tuple[Float[Tensor, "N"], Mapping[str, Tensor]]:
        """Compute a micro-batch forward and, if it has a gradient, backward. Return its log-probabilities, and its
        shares of the metrics of a batch with `trained` tokens."""
        there, counted = to_device(part, self._device), part.trained_mask[part.response_mask]
        output, in_loss = LossOutput(torch.zeros(()), {}), bool(part.loss_mask.any())  # without a token: no loss
        has_gradient = has_gradient and in_loss
        entropies = torch.zeros(len(counted), device=self._device)
        self._model.train(has_gradient)  # recomputation and dropout are for gradients
        try:
            with torch.set_grad_enabled(has_gradient):
                with self._span("forward"), self.autocast():
                    values = self._forward.logprobs(self._model, part, entropies)
                output = loss(values, there, divisors) if in_loss else output
            if has_gradient:
                with self._span("backward"):
                    output.loss.backward()
        finally:
            self._model.eval()
        shares = {"loss/total": output.loss.detach(), **output.metrics}
        if trained:
            [counts] = send(self._device, counted.long().numpy())
            shares["policy/entropy"] = entropies.masked_fill(counts == 0, 0.0).sum() / trained
        return values.detach(), shares

    def _optimizer_step(self, metrics: dict[str, float], rate: float, step: int) -> tuple[str | None, bool]:
        """Make one optimizer step, if all metrics are finite and any gradient is not 0: else earlier moments and weight
        decay would change the weights. Return the fault, and whether it stepped; add the rate, which `optim.ess` may
        lower, to `metrics`."""
        fault = next((f"{name} is {v}" for name, v in metrics.items() if not math.isfinite(v)), None)
        if fault is not None:
            return fault, False
        if self._optim.ess != "none":
            rate *= rate_factor(self._optim.ess, metrics["off/ess"], self._optim.ess_reference)
        metrics["optim/lr"] = rate
        if metrics["optim/grad_norm"] == 0.0 and not self._has_gradient():
            return None, False
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.before_change()
        if self._optim.park:
            move_state(self._optimizer, to_host=False)
        self.updates += 1  # first: an interrupted step may have changed some of the weights
        self._optimizer.step()
        require_finite_weights(self._parameters, self._optim, step, rate)
        return None, True

    def _has_gradient(self) -> bool:
        """True if any number of the gradient is not 0: the norm of small ones can be 0, as their squares are."""
        found = [p.grad.any() for p in self._parameters if p.grad is not None]
        return bool(found) and bool(torch.stack(found).any())

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, by the names of the weights."""
        return state_by_name(self._optimizer, self._names, self._parameters)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's state, as `optimizer.load_state`."""
        load_state(self._optimizer, state, self._names, self._parameters)


def _in_order(batch: Batch, parts: Sequence[Tensor], values: Sequence[Tensor]) -> Float[Tensor, "N"]:
    """Return the results of all parts on the CPU, in the original order of the rows."""
    return torch.cat(list(values)).cpu()[torch.cat([tokens_of(batch, rows) for rows in parts]).argsort()]
