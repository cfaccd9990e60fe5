"""One layer of a Llama-shaped model as two functions around its attention, over weights that last for one generation.

Weights are the trainer's, or copies in the precision of the step; layers that share an input become one product. On a
CPU it is packed into oneDNN's layout. Adapters are merged into float32 copies; in bfloat16 they stay separate: what
they add is often lost when it is rounded together with the weight. Their dropout is for updates only.

Norms, rotation and activation compute what the modules compute, with the same rounding, in fewer calls. They run in
PyTorch's operations, in C on a CPU (`native/decode.c`: a few calls a layer in place of some forty, and a row's bits do
not depend on the rest of the batch), or through torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from grpo_cli.native import ops

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
        return product if self._merges or not any(adapters) else self._beside(product, bases, adapters)

    def _multiply(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        if not self.packed:
            return Linear(weight, bias)
        packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise.default
        return lambda x: multiply(x, packed, bias, "none", [], None)

    def _beside(self, product: Product, bases: Sequence[nn.Linear], adapters: Sequence[Sequence[Adapter]]) -> Product:
        """Compute the adapters: all down projections as one product, all up projections as another."""
        downs = _joined([down.detach().to(self.dtype) for own in adapters for down, _, _ in own])
        ups = list[Tensor]()
        for base, own in zip(bases, adapters, strict=True):
            wide = [(up.detach() * scale).to(self.dtype) for _, up, scale in own]
            ups.append(torch.cat([downs.new_zeros(base.out_features, 0), *wide], dim=1))
        return Beside(product, self._multiply(downs), self._multiply(torch.block_diag(*ups)))


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


@dataclass(frozen=True)
class Block:
    """The parts of one layer, looked up once: attribute access on a module is slow."""

    input_norm: Any
    qkv: Products
    q_norm: Any | None
    k_norm: Any | None
    o_proj: Product
    post_norm: Any
    gate_up: Products
    activation: Any
    down_proj: Product

    @classmethod
    def of(cls, layer: Any, weights: Weights) -> Block:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            input_norm=norm_of(layer.input_layernorm),
            qkv=weights.together(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=norm_of(getattr(attention, "q_norm", None)),
            k_norm=norm_of(getattr(attention, "k_norm", None)),
            o_proj=weights.of(attention.o_proj),
            post_norm=norm_of(layer.post_attention_layernorm),
            gate_up=weights.together(mlp.gate_proj, mlp.up_proj),
            activation=activation_of(mlp.act_fn),
            down_proj=weights.of(mlp.down_proj),
        )


def is_plain(part: Any) -> bool:
    """True if it consists of weights only, without modules, so that one compilation serves all layers."""
    if isinstance(part, tuple):
        return all(map(is_plain, part))
    if is_dataclass(part):
        return all(is_plain(getattr(part, field.name)) for field in fields(part))
    return not isinstance(part, nn.Module)


@dataclass(frozen=True)
class Norm:
    """An RMS norm with the rounding of its module, in fewer calls."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x.float(), self.weight.shape, eps=self.epsilon).to(x.dtype) * self.weight
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # the same bits in any batch
        return (x * root.square_().div_(x.shape[-1]).add_(self.epsilon).rsqrt_()).to(x.dtype) * self.weight


def norm_of(module: Any) -> Any:
    """Return the module, or a `Norm` for RMS norms."""
    if module is None or not type(module).__name__.endswith("RMSNorm"):
        return module
    return Norm(module.weight, module.variance_epsilon)


class Functions:
    """A layer around its attention, in PyTorch's operations. `delta` is what `add` has left to the next norm."""

    def before(
        self, block: Block, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values of a block as [N, heads, dim], the first two rotated."""
        x = self.norm(block.input_norm, hidden, delta, dtype)
        q, k, v = (each.view(len(x), -1, cos.shape[-1]) for each in block.qkv(x))
        if block.q_norm is not None and block.k_norm is not None:
            q, k = block.q_norm(q), block.k_norm(k)
        q, k = self.rotate(q, k, cos, sin, v.dtype)
        return q, k, v

    def after(self, block: Block, hidden: Tensor, attended: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Compute the rest of the block: the next layer's `hidden` and `delta`."""
        hidden, delta = self.add(hidden, block.o_proj(attended))
        gate, up = block.gate_up(self.norm(block.post_norm, hidden, delta, dtype))
        return self.add(hidden, block.down_proj(self.activate(block.activation, gate, up)))

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        return hidden + delta, None

    def norm(self, by: Any, hidden: Tensor, delta: Tensor | None, dtype: torch.dtype) -> Tensor:
        return by(hidden).to(dtype)

    def rotate(
        self, q: Tensor, k: Tensor, cos: Float[Tensor, "N 1 D"], sin: Float[Tensor, "N 1 D"], dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """Apply a rotary embedding, halves convention (as in all supported families); `sin` has the sign."""
        x = torch.cat([q, k], dim=1)
        x = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(dtype)
        return x.split([q.shape[1], k.shape[1]], 1)

    def activate(self, activation: Any, gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate).mul_(up)


class Native(Functions):
    """The same in C, over the memory of `hidden`, queries and keys."""

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        return hidden, delta

    def norm(self, by: Norm, hidden: Tensor, delta: Tensor | None, dtype: torch.dtype) -> Tensor:
        return ops.norm(hidden, delta, by.weight, by.epsilon, dtype)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        q, k = q.to(dtype), k.to(dtype)
        for each in (q, k):
            ops.rotate(each, cos, sin)
        return q, k

    def activate(self, activation: Any, gate: Tensor, up: Tensor) -> Tensor:
        return ops.silu(gate, up)


class Compiled(Functions):
    """The same through torch.compile, which has fixed shapes."""

    def __init__(self, compiler: Callable[[Callable[..., Any]], Any]) -> None:
        self.before = compiler(EAGER.before)  # type: ignore[method-assign]
        self.after = compiler(EAGER.after)  # type: ignore[method-assign]


EAGER, NATIVE = Functions(), Native()


def activation_of(module: Any) -> Any:
    """Return the module, or a function for SiLU, so that a layer is plain."""
    return F.silu if type(module).__name__ in ("SiLU", "SiLUActivation") else module
