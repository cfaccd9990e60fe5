"""torch.compile with a fallback: what cannot be compiled runs uncompiled, with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from grpo_cli.support.errors import reason_of

BACKEND = "inductor"
# More shapes than any function has; PyTorch's default limit is 8.
MOST_SHAPES = 32


class Compiler:
    """A compiler of decode steps' functions until one fails; then all run uncompiled, as they do under a
    dispatch mode, which does not reach compiled functions."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._failed = warn, False

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, MOST_SHAPES)
        # The compiler's advice for float32 on a GPU would round angles of rotary embeddings to 10 bits.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        return partial(self._run, torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND), function)

    def _run(self, compiled: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if not self._failed and not is_in_torch_dispatch_mode(include_infra_modes=False):
            try:
                return compiled(*operands)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                self._failed = True
                reason = reason_of(getattr(error, "inner_exception", error))
                self._warn(f"decode steps run uncompiled, and slower ({reason}); to turn it off: engine.compile=false")
        return plain(*operands)
