"""torch.compile with a fallback: what cannot be compiled runs uncompiled, with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

BACKEND = "inductor"
# More shapes than any function has; PyTorch's default limit is 8.
MOST_SHAPES = 32


class Compiler:
    """Compiles functions until one of them fails; then all run uncompiled. `what` names them in the warning, and `key`
    is the setting that turns compilation off. They also run uncompiled under a dispatch mode, which cannot see into
    compiled functions."""

    def __init__(self, what: str, key: str, warn: Callable[[str], None]) -> None:
        self._what, self._key, self._warn, self._failed = what, key, warn, False

    def compiled(
        self, function: Callable[..., Any], dynamic: bool | None, otherwise: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """`function` compiled, falling back to `otherwise`, by default `function` itself. `dynamic` as in
        torch.compile."""
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        config.recompile_limit = max(config.recompile_limit, MOST_SHAPES)
        # The compiler's advice for float32 on a GPU would round angles of rotary embeddings to 10 bits.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=BACKEND)
        plain = otherwise or function

        def run(*operands: Any) -> Any:
            if not self._failed and not is_in_torch_dispatch_mode(include_infra_modes=False):
                try:
                    return compiled(*operands)
                except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                    self._fall_back(error)
            return plain(*operands)

        return run

    def _fall_back(self, error: Exception) -> None:
        self._failed = True
        cause = getattr(error, "inner_exception", error)
        reason = next(iter(str(cause).strip().splitlines()), "no reason given")
        self._warn(
            f"{self._what} run uncompiled, and slower, because compilation failed ({type(cause).__name__}: {reason}). "
            f"To turn it off: {self._key}=false"
        )
