"""Products with a layer's weights, which last for one generation.

Weights are the trainer's, or copies in the precision of the step; layers that share an input become one product. On a
CPU it is packed into oneDNN's layout. Adapters are merged into float32 copies; in bfloat16 they stay separate: what
they add is often lost when it is rounded together with the weight. Their dropout is for updates only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Product = Callable[[Float[Tensor, "N I"]], Float[Tensor, "N O"]]
# Of layers that share an input: the output of each.
Products = Callable[[Float[Tensor, "N I"]], Sequence[Tensor]]
# The number of weights from which copies are packed: more than fit a processor's caches, from which unpacked ones are
# read just as fast. Preparing a packed product for a new number of rows takes a millisecond, too long for few weights.
PACKED_FROM = 2**23
# A [r, I], B [O, r] and s of x A^T B^T s, which is added to a layer's output.
Adapter = tuple[Tensor, Tensor, float]


@dataclass(frozen=True)
class Linear:
    """x W^T + b. This and the next three hold their weights as fields, so that one compilation serves all layers."""

    weight: Float[Tensor, "O I"]
    bias: Float[Tensor, "O"] | None = None

    def __call__(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N O"]:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class WithAdapters:
    """A product plus the output of adapters."""

    product: Product
    read: Product
    write: Product

    def __call__(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N O"]:
        return self.product(x) + self.write(self.read(x))


@dataclass(frozen=True)
class Split:
    """One product, split into those of several layers."""

    product: Product
    sizes: tuple[int, ...]

    def __call__(self, x: Float[Tensor, "N I"]) -> Sequence[Tensor]:
        return self.product(x).split(self.sizes, -1)


@dataclass(frozen=True)
class Each:
    """A product for each layer."""

    layers: tuple[Product, ...]

    def __call__(self, x: Float[Tensor, "N I"]) -> Sequence[Tensor]:
        return [layer(x) for layer in self.layers]


@dataclass(frozen=True)
class Weights:
    """Weights in `dtype`. Those in it are not copied, unless all are `packed`, or `joined` for fewer products."""

    dtype: torch.dtype
    packed: bool
    joined: bool = False

    def of(self, layer: Any) -> Product:
        """Return one layer's product. A layer that cannot be copied (quantised, or with other than low-rank adapters),
        or would be only to merge its adapters, is used as it is."""
        adapters, base = adapters_of(layer), getattr(layer, "base_layer", layer)
        if adapters is None or type(base) is not nn.Linear or adapters and self._merges and not self._copies(base):
            return layer
        return self._product([base], [adapters])

    def together(self, *layers: Any) -> Products:
        """Return one product for all layers, if all are copied."""
        found = [adapters_of(layer) for layer in layers]
        bases = [getattr(layer, "base_layer", layer) for layer in layers]
        adapters = [own for own in found if own is not None]
        if len(adapters) < len(layers) or not all(type(base) is nn.Linear and self._copies(base) for base in bases):
            return Each(tuple(map(self.of, layers)))
        return Split(self._product(bases, adapters), tuple(base.out_features for base in bases))

    @property
    def _merges(self) -> bool:
        return self.dtype == torch.float32

    def _copies(self, base: nn.Linear) -> bool:
        return self.packed or self.joined or base.weight.dtype != self.dtype

    def _product(self, bases: Sequence[nn.Linear], adapters: Sequence[Sequence[Adapter]]) -> Product:
        weights = [base.weight.detach().to(self.dtype) for base in bases]
        for place, own in enumerate(adapters if self._merges else ()):
            for down, up, scale in own:
                weights[place] = torch.addmm(weights[place], up.detach(), down.detach(), alpha=scale)
        biases: list[Tensor] = []
        if any(base.bias is not None for base in bases):
            nothing = [weight.new_zeros(len(weight)) for weight in weights]
            biases = [none if base.bias is None else base.bias for base, none in zip(bases, nothing, strict=True)]
        product = self._multiply(_joined(weights), _joined(biases).detach().to(self.dtype) if biases else None)
        return product if self._merges or not any(adapters) else self._with_adapters(product, bases, adapters)

    def _multiply(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        if not self.packed:
            return Linear(weight, bias)
        packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise.default
        return lambda x: multiply(x, packed, bias, "none", [], None)

    def _with_adapters(
        self, product: Product, bases: Sequence[nn.Linear], adapters: Sequence[Sequence[Adapter]]
    ) -> Product:
        """Compute the adapters: all down projections as one product, all up projections as another."""
        downs = _joined([down.detach().to(self.dtype) for own in adapters for down, _, _ in own])
        ups = list[Tensor]()
        for base, own in zip(bases, adapters, strict=True):
            wide = [(up.detach() * scale).to(self.dtype) for _, up, scale in own]
            ups.append(torch.cat([downs.new_zeros(base.out_features, 0), *wide], dim=1))
        return WithAdapters(product, self._multiply(downs), self._multiply(torch.block_diag(*ups)))


def adapters_of(layer: Any) -> list[Adapter] | None:
    """Return the active adapters of a layer, empty for a plain one; None if they are not plain low-rank adapters."""
    down = getattr(layer, "lora_A", None)
    if down is None:
        return []
    names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in down]
    biased = any(layer.lora_B[name].bias is not None for name in names)
    if layer.merged or getattr(layer, "lora_variant", None) or biased:
        return None
    return [(down[name].weight, layer.lora_B[name].weight, layer.scaling[name]) for name in names]


def linear_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """Yield the plain linear layers, which can be copied, adapters' included."""
    return (one for one in module.modules() if type(one) is nn.Linear)


def has_packed(dtype: torch.dtype) -> bool:
    """True if oneDNN has packed products in this precision here: those in bfloat16 need AVX-512 or AVX-NE-CONVERT."""
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
