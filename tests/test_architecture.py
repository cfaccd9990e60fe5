"""Who imports whom: a room imports only from rows above its own, and nothing in circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grpo_cli

PACKAGE = Path(grpo_cli.__file__).parent

# A room is a module of the package's top level, or a folder (a wing), whose modules may also import each other.
TABLE = (PACKAGE / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Who imports whom")[2]
ROWS = re.findall(r"^\| \d+ \| `([^`]+)`", TABLE, re.MULTILINE)
ROW = {room: row for row, rooms in enumerate(ROWS) for room in rooms.split()}
MODULES = [file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"]
FILES = {file.relative_to(PACKAGE).with_suffix("").as_posix(): file for file in MODULES}
TREES = {module: ast.parse(file.read_text(encoding="utf-8")) for module, file in FILES.items()}


def imports(module: str) -> Iterator[str]:
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module: str) -> set[str]:
    names = {one.removeprefix("grpo_cli.").replace(".", "/") for one in imports(module) if one.startswith("grpo_cli.")}
    # `from grpo_cli.types import Prompt` names types/Prompt, `from grpo_cli import experiment` the module itself.
    return {found for name in names if (found := name if name in FILES else name.rpartition("/")[0]) in FILES}


def place(module: str) -> str:
    """The entry of the table that speaks for a module."""
    return next(entry for entry in ROW if entry == module or (entry[-1] == "/" and module.startswith(entry)))


def test_rooms_import_only_from_rows_above_their_own():
    assert len(ROW) > 20, "the page has its table"
    wrong = []
    for module in FILES:
        for other in own_imports(module):
            same_folder = place(module).endswith("/") and place(module) == place(other)
            if not same_folder and ROW[place(other)] >= ROW[place(module)]:
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_modules_do_not_import_in_circles():
    left = {module: own_imports(module) for module in FILES}
    while ready := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in ready}
    assert sorted(left) == []


def test_the_trainer_knows_no_concrete_part():
    concrete = ("tasks/", "engine/", "model/", "tracking/", "collect/", "methods/", "rules/")
    allowed = {"tracking/examples", "tracking/health", "tracking/progress"}
    allowed |= {"collect/collection", "collect/requests", "collect/rule_state"}
    known = (own_imports("train") | own_imports("step")) - allowed
    assert [module for module in known if module.startswith(concrete)] == []


def test_published_methods_are_named_by_their_yaml_alone():
    users = {module for module in FILES for other in own_imports(module) if other.startswith("methods/")}
    assert {module for module in users if not module.startswith(("methods/", "experimental/"))} == set()


# Where a choice is made or a run is put together; words there that mean something else than the choice of that name.
KNOWS_NO_CHOICE = re.compile("config/.*|step|train|experiment|evaluate|select")
OTHER_MEANING = {
    "config/prepare": {"none", "full"},  # values of model.quantize and model.gradient_checkpointing
    "config/auto": {"none"},  # a value of model.autocast
}


def test_parts_are_asked_and_not_known_by_the_names_of_their_choices():
    names, known = {file.stem for file in PACKAGE.parent.glob("conf/*/[!_]*.yaml")}, {}
    for module in filter(KNOWS_NO_CHOICE.fullmatch, FILES):
        constants = {node.value for node in ast.walk(TREES[module]) if isinstance(node, ast.Constant)}
        known |= {module: found} if (found := constants & names) else {}
    assert known == OTHER_MEANING
