"""Who imports whom: a module imports only from rows above its own, and each library comes in by its own doors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grpo_cli

PACKAGE = Path(grpo_cli.__file__).parent

# Modules of a folder given as `tasks/` may also import each other.
ROWS = """
errors
settings typed files text hiding provenance screen processor
types
interfaces
downsample advantage correction loss batch metrics tracking console meter checkpoint tasks/ model/
logprobs
passes optimizer
engine/interfaces engine/sampler engine/makespan engine/lengths
engine/sequence engine/cache engine/sample engine/padding
engine/line
engine/attention engine/eviction
engine/keeper
engine/schedule engine/predict engine/sparsity engine/decoder
engine/slots engine/simulate engine/graph
engine/stop engine/invariance
engine/generation
engine/served engine/admission engine/vllm_process
engine/vllm_options
engine/engine engine/vllm
rollout
health evaluate learner select report/
progress
profile/
train
config jobs
board overrides
words
launcher
making
experiment
profiling arguments
cli
__main__
"""

DOORS = {
    "hydra": {"cli", "experiment", "launcher", "making", "profile/", "words"},
    "omegaconf": {"cli", "config", "launcher", "overrides", "words"},
    "wandb": {"tracking"},
    "vllm": {"engine/vllm", "engine/vllm_options", "engine/vllm_process"},
    "transformers": {"model/"},
    "peft": {"model/"},
    "bitsandbytes": {"optimizer"},
    "safetensors": {"model/"},
    "huggingface_hub": {"model/"},
    "datasets": {"tasks/"},
    "math_verify": {"tasks/"},
    "typer": {"cli"},
    "rich": {"board", "cli", "console", "profile/", "report/", "screen"},
    "matplotlib": {"profile/", "report/"},
}


def modules() -> dict[str, Path]:
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"]
    return {file.relative_to(PACKAGE).with_suffix("").as_posix(): file for file in files}


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def place(module: str) -> str:
    """The entry of the table that speaks for a module."""
    return next(
        (entry for entry in ROWS.split() if entry == module or (entry.endswith("/") and module.startswith(entry))), ""
    )


def row(entry: str) -> int:
    return next(i for i, line in enumerate(ROWS.splitlines()) if entry in line.split())


def own_imports(file: Path) -> set[str]:
    names = {name.removeprefix("grpo_cli.").replace(".", "/") for name in imports(file) if name.startswith("grpo_cli.")}
    known = modules()
    # `from grpo_cli.types import Prompt` names types/Prompt, `from grpo_cli import experiment` the module itself.
    return {m for name in names if (m := name if name in known else name.rpartition("/")[0]) in known}


def test_every_module_has_a_place_in_the_table():
    assert [module for module in modules() if not place(module)] == []


def test_modules_import_only_from_rows_above_their_own():
    wrong = []
    for module, file in modules().items():
        for other in own_imports(file):
            same_folder = place(module).endswith("/") and place(module) == place(other)
            if not same_folder and row(place(other)) >= row(place(module)):
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_libraries_come_in_by_their_doors_only():
    wrong = []
    for module, file in modules().items():
        for library in {name.partition(".")[0] for name in imports(file)} & DOORS.keys():
            if place(module) not in DOORS[library]:
                wrong.append(f"{module} imports {library}")
    assert wrong == []


def test_the_trainer_knows_no_concrete_part():
    concrete = ("tasks/", "engine/", "model/", "tracking", "console", "advantage", "correction", "loss")
    assert [module for module in own_imports(PACKAGE / "train.py") if module.startswith(concrete)] == []
