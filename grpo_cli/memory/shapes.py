"""The bytes of a forward and backward pass, from the model's own code on fake tensors, which have shapes and no memory.

At each moment of a pass they are a + b L + c T + d L T for L layers and T tokens. Four runs find these numbers: models
of one layer and of two, each with two numbers of tokens.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from grpo_cli.engine.kv_cache import KvLayout
from grpo_cli.engine.products import PACKED_FROM, has_packed, linear_layers
from grpo_cli.learner.logprobs import AT_ONCE, ByRow, chosen_logprobs
from grpo_cli.model.adapters import made_anew
from grpo_cli.model.anatomy import backbone
from grpo_cli.model.checkpointing import keep_little, last_states, recompute_layers
from grpo_cli.model.checks import ARCHITECTURES
from grpo_cli.model.load import load_model, model_config
from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.memory import storage_bytes

Sizes = Mapping[str, int]  # bytes by kind
Line = Callable[[int, int], dict[str, int]]  # of layers and tokens: bytes by kind
_DEVICE = torch.ops.prim.device.default
LOGITS, ACTIVATIONS, _BEFORE = "logits", "activations", "before"
# Bits of a weight in NF4: 4, plus an 8-bit scale per 64 weights and a 32-bit one per 256 scales (arXiv 2305.14314, 3).
BITS = {"none": None, "8bit": 8.0, "4bit": 4 + 8 / 64 + 32 / (64 * 256)}
_ATTENTION = "grpo_shapes"


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Allocate what a fused kernel keeps: its result and a number for each query."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
    q, k, v = (x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return out.transpose(1, 2), None


# In place of a pass over the logits, whose few rows in float32 are added by `softmax_bytes`.
_OF_NO_SIZE = ByRow(lambda logits, ids, _: logits.new_empty(ids.shape, dtype=torch.float32), lambda *_: None)
AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, lambda *args, **options: None)


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that were made under it and live: logits (their last dimension is the vocabulary), and all
    others. It sees each operation, on real tensors as well as on fake ones, but no kernel's internal workspace. A
    model's weights, buffers and gradients that are there before do not count."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._vocabulary = int(model.config.vocab_size)
        self._live, self._peak = Counter[str](), Counter[str]()
        self._watchers: dict[int, weakref.ref[Any]] = {}  # by storage
        for tensor in [*model.parameters(), *model.buffers(), *(weight.grad for weight in model.parameters())]:
            if tensor is not None:
                self._watch(tensor, _BEFORE)

    def take_peak(self) -> Mapping[str, int]:
        """Return bytes by kind at the peak since the last call."""
        peak, self._peak = self._peak, self._live.copy()
        return {kind: peak[kind] for kind in (LOGITS, ACTIVATIONS)}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE:  # two of three calls: autograd needs it of every fake tensor
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._watchers:
                self._watch(tensor, LOGITS if tensor.shape[-1:] == (self._vocabulary,) else ACTIVATIONS)
        if self._live.total() > self._peak.total():
            self._peak = self._live.copy()
        return result

    def _watch(self, tensor: Tensor, kind: str) -> None:
        """Count a new storage under this kind until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()

        def gone(_: Any) -> None:
            del self._watchers[key]
            self._live[kind] -= size

        self._watchers[key] = weakref.ref(storage, gone)
        self._live[kind] += size


def affine(few: int, found: Sequence[Sequence[Sizes]]) -> Line:
    """Return bytes by kind for L layers and T tokens, linear in each, from 1 and 2 layers, `few` and 2 `few` tokens."""

    def at(kind: str, depth: int, length: float) -> int:
        (a, b), (c, d) = ([sizes[kind] for sizes in row] for row in found)
        low, high = a + depth * (c - a), b + depth * (d - b)
        return max(0, round(low + length * (high - low)))

    kinds = LOGITS, ACTIVATIONS
    return lambda layers, tokens: {kind: at(kind, layers - 1, (tokens - few) / few) for kind in kinds}


class ShapeModel:
    """A model without weights, and what its passes take. UserError for a model that is not Llama-shaped."""

    def __init__(self, settings: ModelSettings, device: torch.device) -> None:
        self.config = model_config(settings, any_family=True)
        if self.config.model_type not in ARCHITECTURES:
            which = f"model.path={settings.path} is a {self.config.model_type}: memory is planned for Llama-shaped"
            raise UserError(f"{which} models only; leave out fit and train.micro_batch_tokens=auto")
        self.settings, self.device, self.layers = settings, device, int(self.config.num_hidden_layers)
        self.on_cpu = device.type == "cpu"
        self._bits = BITS[settings.quantize]
        self.vocabulary = int(self.config.vocab_size)
        # The precision of products.
        self.dtype: torch.dtype = getattr(torch, settings.dtype if settings.autocast == "none" else settings.autocast)
        heads, kv_heads = int(self.config.num_attention_heads), int(self.config.num_key_value_heads)
        dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        self.layout = KvLayout(self.layers, kv_heads, dim, self.dtype, group=heads // kv_heads)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._models = [self._made(layers) for layers in (1, 2)]
        self.train_lines = cache(self._train_lines)

    def _made(self, layers: int) -> Any:
        settings = replace(made_anew(self.settings), random_init=True, quantize="none", offload_activations=False)
        # PEFT moves new adapters to the device that they are on already, which a fake parameter cannot be.
        with self._fake, patch.object(nn.Module, "to", lambda module, *_, **__: module):
            model = load_model(settings, torch.device("cpu"), any_family=True, layers=layers)
        backbone(model).config._attn_implementation = _ATTENTION
        if self.settings.offload_activations:
            keep = lambda: saved_tensors_hooks(lambda x: (x.shape, x.dtype), lambda x: torch.empty(x[0], dtype=x[1]))  # noqa: E731
            recompute_layers(model, "full", keep)
        return model

    def of_all_layers(self, count: Callable[[Any], int | float]) -> int:
        """Extrapolate a number that is affine in layers."""
        few, many = map(count, self._models)
        return int(few + (many - few) * (self.layers - 1))

    @cached_property
    def gradients(self) -> int:
        return self.of_all_layers(lambda model: storage_bytes(trained(model)))

    @property
    def embedding_gradient(self) -> int:
        return storage_bytes(trained(self._models[0].get_input_embeddings()))

    def logits_bytes(self, rows: int) -> int:
        return rows * self.vocabulary * self.dtype.itemsize

    def softmax_bytes(self, rows: int) -> int:
        """Return the bytes of two numbers in float32 for each logit of the rows that are converted together."""
        return 8 * self.vocabulary * min(rows, max(1, AT_ONCE[self.device.type] // self.vocabulary))

    def copied(self, packed: bool) -> int:
        """Return the bytes of the copies of weights that rollouts multiply by: in another precision, or on a CPU packed
        (large models), or joined (small ones)."""
        if self._bits is not None:
            return 0

        def numbers(model: Any, every: bool = True) -> int:
            weights = [layer.weight for layer in linear_layers(model)]
            return sum(weight.numel() for weight in weights if every or weight.dtype != self.dtype)

        every = self.on_cpu and (packed and has_packed(self.dtype) or self.of_all_layers(numbers) < PACKED_FROM)
        return self.dtype.itemsize * self.of_all_layers(lambda model: numbers(model, every))

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights and buffers, shared ones counted once."""

        def held(model: Any) -> int | float:
            whole = storage_bytes([*model.parameters(), *model.buffers()])
            return whole - sum(w.nbytes - w.numel() * self._bits / 8 for w in _quantised(model) if self._bits)

        return self.of_all_layers(held)

    @property
    def dequantised(self) -> int:
        """Bytes of the largest quantised weight, which is made whole while it is used."""
        return self.dtype.itemsize * max(w.numel() for w in _quantised(self._models[0])) if self._bits else 0

    @cached_property
    def line_without_gradients(self) -> Line:
        """The memory of the layers, one after the other."""
        found = [self._pass(self._models[0], tokens, None, True)[0] for tokens in (2048, 4096)]
        return affine(2048, [found, found])

    def _train_lines(self, chunk: int, spares: bool) -> list[Line]:
        """Return the parts of a forward and backward pass: layers, head, back through the head, the layers, the
        embedding. Gradients of an earlier pass are there."""
        tokens = max(2048, 4 * chunk)
        found = [[self._pass(model, count, chunk, spares) for count in (tokens, 2 * tokens)] for model in self._models]
        return [affine(tokens, part) for part in zip(*(zip(*row, strict=True) for row in found), strict=True)]

    def _pass(self, model: Any, tokens: int, chunk: int | None, spares: bool) -> list[Sizes]:
        """Return the peaks of the parts of a pass, that of the layers alone without a `chunk` of tokens to train on."""
        peaks, trains = list[Sizes](), chunk is not None
        keep_little(model.train(trains), spares)
        with self._fake:
            for parameter in trained(model) if trains else ():
                parameter.grad = torch.zeros_like(parameter)
        precision = torch.autocast("cpu", self.dtype, enabled=self.settings.autocast != "none")
        with self._fake, Allocations(model) as allocations, torch.set_grad_enabled(trains), precision:

            def note(*_: Any) -> None:
                peaks.append(allocations.take_peak())

            def hook(module: Any, args: Any, out: Tensor) -> None:
                if out.requires_grad:
                    out.register_hook(note)

            embedding = model.get_input_embeddings().register_forward_hook(hook)
            ids = torch.zeros(1, tokens, dtype=torch.long)
            states = last_states(model, ids)[0]
            note()
            if chunk is not None:
                states.register_hook(note)
                few = ids[0, : 4 * chunk]  # more of them would take time and no other bytes
                values = chosen_logprobs(model, states.index_select(0, few), few, 1.0, chunk, _OF_NO_SIZE)
                note()
                del states
                values.sum().backward()
                note()
            embedding.remove()
        model.zero_grad()
        return peaks


def trained(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _quantised(model: Any) -> list[Tensor]:
    """Return the weights that bitsandbytes quantises: of linear layers, but for the head and the adapters."""
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [module.weight for name, module in named if "lora_" not in name and not name.endswith("lm_head")]
