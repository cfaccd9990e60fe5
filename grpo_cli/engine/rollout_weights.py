"""The linear layers of a step: the trainer's own, or copies of them that last for one generation.

A copy is in the precision of the step; layers that share an input become one product. On a CPU it is packed into
oneDNN's layout. Adapters are merged into float32 copies; in bfloat16 they stay separate: what they add is often lost
when it is rounded together with the weight. Their dropout is for updates only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Product = Callable[[Float[Tensor, "N I"]], Float[Tensor, "N O"]]
# Of layers that share an input: the output of each.
Products = Callable[[Float[Tensor, "N I"]], Sequence[Tensor]]


@dataclass(frozen=True)
class Adapter:
    """x A^T B^T, to be scaled and added to its layer's output."""

    down: Float[Tensor, "r I"]
    up: Float[Tensor, "O r"]
    scale: float


@dataclass(frozen=True)
class Linear:
    """x W^T + b. This and the next three hold their weights as fields, so that one compilation serves all layers."""

    weight: Float[Tensor, "O I"]
    bias: Float[Tensor, "O"] | None = None

    def __call__(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N O"]:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Beside:
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


def is_plain(product: Any) -> bool:
    """True if it consists of plain weights only, without modules."""
    parts = {Beside: ("product", "read", "write"), Split: ("product",), Linear: ()}
    if isinstance(product, Each):
        return all(map(is_plain, product.layers))
    return type(product) in parts and all(is_plain(getattr(product, name)) for name in parts[type(product)])


@dataclass(frozen=True)
class AsTheyAre:
    """No copies: the modules themselves."""

    def of(self, layer: Any) -> Product:
        return layer

    def together(self, *layers: Any) -> Products:
        return Each(layers)


@dataclass(frozen=True)
class Copies:
    """Copies in `dtype`; unless `packed` or `joined`, only of weights that are not in it already. `joined`: for fewer
    products, not for the sake of their layout."""

    dtype: torch.dtype
    packed: bool
    joined: bool = False

    def of(self, layer: Any) -> Product:
        """A layer that cannot be copied (quantised, or with other than low-rank adapters) is used as it is."""
        adapters = adapters_of(layer)
        base = getattr(layer, "base_layer", layer)
        if adapters is None or type(base) is not nn.Linear:
            return layer
        if self._copies(base):
            return self._product([base], [adapters])
        plain = Linear(base.weight.detach(), None if base.bias is None else base.bias.detach())
        if adapters:
            return layer if self._merges else self._beside(plain, [base], [adapters])
        return plain

    def together(self, *layers: Any) -> Products:
        """Return one product for all layers, if all are copied."""
        found = [adapters_of(layer) for layer in layers]
        bases = [getattr(layer, "base_layer", layer) for layer in layers]
        adapters = [own for own in found if own is not None]
        if len(adapters) < len(layers) or not all(type(base) is nn.Linear and self._copies(base) for base in bases):
            return AsTheyAre().together(*map(self.of, layers))
        return Split(self._product(bases, adapters), tuple(base.out_features for base in bases))

    @property
    def _merges(self) -> bool:
        return self.dtype == torch.float32

    def _copies(self, base: nn.Linear) -> bool:
        return self.packed or self.joined or base.weight.dtype != self.dtype

    def _product(self, bases: Sequence[nn.Linear], adapters: Sequence[Sequence[Adapter]]) -> Product:
        weights = [base.weight.detach().to(self.dtype) for base in bases]
        if self._merges:
            weights = [_merged(weight, own) for weight, own in zip(weights, adapters, strict=True)]
        biases: list[Tensor] = []
        if any(base.bias is not None for base in bases):
            nothing = [weight.new_zeros(len(weight)) for weight in weights]
            biases = [none if base.bias is None else base.bias for base, none in zip(bases, nothing, strict=True)]
        product = self._multiply(_joined(weights), _joined(biases).detach().to(self.dtype) if biases else None)
        return product if self._merges or not any(adapters) else self._beside(product, bases, adapters)

    def _multiply(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        if not self.packed:
            return Linear(weight, bias)
        if isinstance(weight, FakeTensor):  # which cannot be packed, and packed would take the same bytes
            return Copies(self.dtype, False)._multiply(weight.clone(), bias)
        packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise.default
        return lambda x: multiply(x, packed, bias, "none", [], None)

    def _beside(self, product: Product, bases: Sequence[nn.Linear], adapters: Sequence[Sequence[Adapter]]) -> Product:
        """Compute the adapters: all down projections as one product, all up projections as another."""
        downs = _joined([adapter.down.detach().to(self.dtype) for own in adapters for adapter in own])
        sizes = [base.out_features for base in bases]
        ups = downs.new_zeros(sum(sizes), len(downs))
        last = 0
        for end, size, own in zip(accumulate(sizes), sizes, adapters, strict=True):
            for adapter in own:
                first, last = last, last + len(adapter.down)
                ups[end - size : end, first:last] = adapter.up.detach() * adapter.scale
        return Beside(product, self._multiply(downs), self._multiply(ups))


def adapters_of(layer: Any) -> list[Adapter] | None:
    """Return the active adapters of a layer, empty for a plain one; None if they are not plain low-rank adapters."""
    down = getattr(layer, "lora_A", None)
    if down is None:
        return []
    names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in down]
    if (
        layer.merged
        or getattr(layer, "lora_variant", None)
        or any(layer.lora_B[name].bias is not None for name in names)
    ):
        return None
    return [Adapter(down[name].weight, layer.lora_B[name].weight, layer.scaling[name]) for name in names]


def linear_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """Yield the plain linear layers, which can be copied, adapters' included."""
    return (one for one in module.modules() if type(one) is nn.Linear)


def can_pack() -> bool:
    """True if this PyTorch has oneDNN's packed products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _merged(weight: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    for one in adapters:
        weight = torch.addmm(weight, one.up.detach(), one.down.detach(), alpha=one.scale)
    return weight


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
