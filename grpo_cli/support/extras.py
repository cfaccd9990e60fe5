"""The error where an optional library is not installed: one sentence, with the command that installs it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from grpo_cli.support.errors import UserError

# The extra of pyproject.toml that brings each module.
EXTRAS = {name: name for name in ("peft", "ray", "tensorboard", "trackio", "vllm")}
EXTRAS |= {"bitsandbytes": "bnb", "math_verify": "math", "matplotlib": "plot", "reasoning_gym": "gym"}
EXTRAS |= {"datasets": "hub", "pyarrow": "hub"}
_PLUGINS = ("joblib_launcher", "optuna_sweeper", "ray_launcher", "submitit_launcher")
EXTRAS |= {f"hydra_plugins.hydra_{name}": name.partition("_")[0] for name in _PLUGINS}


def installed(module: str) -> bool:
    """True if a module is installed. It is not imported."""
    return sys.modules.get(module) is not None or find_spec(module) is not None


def absent(module: str, setting: str, instead: str = "") -> str:
    """Return that `setting` needs a module that is not installed; `instead` is another way out."""
    name = module.removeprefix("hydra_plugins.").replace("_", "-")
    command = f"pip install 'grpo-cli[{EXTRAS[module]}]'"
    return f"{setting} needs {name}, which is not installed: {command}{instead and f'; {instead}'}"


def require(module: str, setting: str, instead: str = "") -> None:
    """Raise UserError if a module of an extra is not installed."""
    if not installed(module):
        raise UserError(absent(module, setting, instead))
