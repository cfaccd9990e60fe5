"""Who imports whom: a room imports only from rows above its own, and each library comes in by its own doors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import grpo_cli

PACKAGE = Path(grpo_cli.__file__).parent

# A room is a module of the package's top level, or a folder (a wing), whose modules may also import each other.
ROWS = """
support/
settings native/
types
history
interfaces runs/
rules/ metrics model/ tasks/
engine/
learner/ select report/
collect/ tracking/
methods/
experimental/
config/
sweep/ evaluate step
train
experiment
memory/
cli/
__main__
"""
MOST_ROOMS = 29

DOORS = {
    "hydra": {"cli/", "config/", "experiment", "sweep/", "memory/"},
    "omegaconf": {"cli/", "config/", "sweep/"},
    "wandb": {"tracking/"},
    "trackio": {"tracking/"},
    "vllm": {"engine/"},
    "transformers": {"model/", "tasks/", "engine/", "memory/"},
    "peft": {"model/"},
    "bitsandbytes": {"learner/"},
    "safetensors": {"model/"},
    "huggingface_hub": {"model/"},
    "datasets": {"tasks/"},
    "httpx": {"tasks/"},
    "math_verify": {"tasks/"},
    "typer": {"cli/"},
    "rich": {"cli/", "sweep/", "support/", "tracking/", "memory/", "report/"},
    "jinja2": {"tasks/"},
    "matplotlib": {"report/"},
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


def test_a_person_can_keep_the_rooms_in_mind():
    rooms = {module.partition("/")[0] for module in modules()} | {"__init__"}
    assert len(rooms) <= MOST_ROOMS


def test_rooms_import_only_from_rows_above_their_own():
    wrong = []
    for module, file in modules().items():
        for other in own_imports(file):
            same_folder = place(module).endswith("/") and place(module) == place(other)
            if not same_folder and row(place(other)) >= row(place(module)):
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_modules_do_not_import_in_circles():
    left = {module: own_imports(file) for module, file in modules().items()}
    while ready := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in ready}
    assert sorted(left) == []


def test_libraries_come_in_by_their_doors_only():
    wrong = []
    for module, file in modules().items():
        for library in {name.partition(".")[0] for name in imports(file)} & DOORS.keys():
            if not module.startswith(tuple(DOORS[library])):
                wrong.append(f"{module} imports {library}")
    assert wrong == []


def test_the_trainer_knows_no_concrete_part():
    concrete = ("tasks/", "engine/", "model/", "tracking/", "collect/", "methods/", "rules/")
    allowed = {
        "tracking/examples",
        "tracking/health",
        "tracking/progress",
        "collect/collection",
        "collect/requests",
        "collect/rule_state",
    }
    known = (own_imports(PACKAGE / "train.py") | own_imports(PACKAGE / "step.py")) - allowed
    assert [module for module in known if module.startswith(concrete)] == []


def test_published_methods_are_named_by_their_yaml_alone():
    users = {
        module for module, file in modules().items() for other in own_imports(file) if other.startswith("methods/")
    }
    assert {module for module in users if not module.startswith(("methods/", "experimental/"))} == set()


# What several experimental methods use; no method by itself.
SHARED = {f"experimental/{name}" for name in ("given", "reading", "ridge_probe", "search")}


def test_a_method_says_its_source_and_what_was_measured_of_it():
    for module, file in modules().items():
        if module.startswith(("methods/", "experimental/")) and module not in SHARED:
            said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            assert re.search(r"^(Not measured|Measured: docs/studies\.md)", said, re.MULTILINE), module
            assert "arXiv" in said or module == "experimental/lightning_rl", module


# Where a choice is made or a run is put together; words there that mean something else than the choice of that name.
KNOWS_NO_CHOICE = ("config/", "step", "train", "experiment", "evaluate", "select", "profile/from_settings")
OTHER_MEANING = {
    # values of model.quantize, optim.ess, profile.lengths; keys, one of them of adapters
    "config/check": {"none", "sqrt", "full", "epochs", "dora"},
    "config/compose": {"profile"},  # the command
    "config/instantiate": {"none"},  # a value of engine.quantize
    "config/overrides": {"hf"},  # whose YAML lists every setting of a model
    "config/prepare": {"none"},  # a value of fit
    "config/auto": {"hf", "none"},  # none: a value of model.autocast
    "config/removed": {"none"},  # a value of settings that are gone
    "train": {"none"},  # a value of optim.ess
    "profile/from_settings": {"none", "profile"},  # values of model.quantize; a field of the settings
}


def test_parts_are_asked_and_not_known_by_the_names_of_their_choices():
    files = PACKAGE.parent.glob("conf/*/[!_]*.yaml")
    names = {file.stem for file in files}
    wrong = []
    for module, node in definitions(ast.Constant):
        if (
            module.startswith(KNOWS_NO_CHOICE)
            and not module.startswith("experimental/")
            and node.value in names - OTHER_MEANING.get(module, set())
        ):
            wrong.append(f"{module}, line {node.lineno}: {node.value!r}")
    assert wrong == []


def definitions(kind: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    for module, file in modules().items():
        yield from ((module, node) for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, kind))


def test_a_class_s_name_means_one_thing():
    modules_of: dict[str, list[str]] = {}
    for module, node in definitions(ast.ClassDef):
        modules_of.setdefault(node.name, []).append(module)
    assert {name: places for name, places in modules_of.items() if len(places) > 1} == {}


def test_functions_are_short():
    lengths = {f"{module}.{f.name}": f.end_lineno - f.lineno + 1 for module, f in definitions(ast.FunctionDef)}
    assert median(lengths.values()) <= 8
    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}
