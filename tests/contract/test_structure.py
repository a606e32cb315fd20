"""The rules of the project's own structure: who may import whom, who may know what, and how long things may be."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "src" / "deepstack_serving"
SOURCES = sorted(PACKAGE.rglob("*.py"))
ADAPTERS = sorted((PROJECT / "model_repository").glob("*/1/model.py"))
CLIENT = sorted((PROJECT / "client" / "deepstack_client").rglob("*.py"))
TESTS = sorted((PROJECT / "tests").rglob("*.py"))
OTHER = [*TESTS, *(path for folder in ("bench", "demo") for path in sorted((PROJECT / folder).rglob("*.py")))]
MODULES = [path for path in SOURCES if path != PACKAGE / "__init__.py"]
BROAD = {"Exception", "BaseException"}

# A module imports from its own group and from the layers above it in this list. The groups beside the layers lay out
# and start the server, and no layer imports them; planning reads checkpoints as the stages do.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("rules", "files", "regions", "gpu_memory"),
    ("settings", "injection"),
    ("wire", "audit_protocol"),
    ("pipelines",),
    ("kv_pool", "sampling", "feature_cache", "media", "lora", "exchange"),
    ("attention", "families"),
    ("checkpoint", "prompt"),
    ("execution",),
    ("stages",),
    ("engine",),
    ("triton_bridge",),
    ("adapters",),
)
RANK = {group: rank for rank, layer in enumerate(LAYERS) for group in layer}
BESIDE = {"serve", "deployment", "audit", "example_commands", "embedded", "repository", "repository_command"}
BESIDE |= {"command_line", "planning"}
BESIDE_MAY_IMPORT = {*BESIDE, "settings", "wire", "audit_protocol", "errors", "regions", "pipelines"}
PLANNING_MAY_IMPORT = {*BESIDE_MAY_IMPORT, "injection", "kv_pool", "checkpoint", "stages"}


def relative(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def group_of(path: Path) -> str:
    """The part of the package that a file belongs to; nothing for a file outside of it."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py") if path.is_relative_to(PACKAGE) else ""


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_groups(path: Path) -> set[str]:
    own = [name.split(".") for name in imported_modules(path) if name.startswith("deepstack_serving.")]
    return {parts[1] for parts in own} - {group_of(path)}


def offenders(paths: Iterable[Path], breaks: Callable[[Path], object]) -> list[str]:
    """The files that break a rule, with what the rule found."""
    return [f"{relative(path)}: {found}" for path in paths if (found := breaks(path))]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_every_module_has_a_place() -> None:
    assert {group_of(path) for path in MODULES} <= RANK.keys() | BESIDE


def test_imports_point_downwards() -> None:
    def upwards(path: Path) -> set[str]:
        group, imported = group_of(path), imported_groups(path)
        if group in BESIDE:
            return imported - (PLANNING_MAY_IMPORT if group == "planning" else BESIDE_MAY_IMPORT)
        return {name for name in imported if RANK.get(name, len(LAYERS)) >= RANK.get(group, 0)}

    assert offenders(MODULES, upwards) == []


def test_model_files_import_adapters_only_and_late() -> None:
    def early(path: Path) -> set[str | None]:
        top = {node.module for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)}
        return (top - {"__future__", "typing"}) | (imported_groups(path) ^ {"adapters"})

    assert offenders(ADAPTERS, early) == []


def test_model_files_are_short() -> None:
    assert offenders(ADAPTERS, lambda path: lines(path) if lines(path) > 60 else 0) == []


def test_one_module_knows_tritons_python_api() -> None:
    users = [path for path in (*SOURCES, *ADAPTERS) if "triton_python_backend_utils" in path.read_text()]
    assert [relative(path) for path in users] == ["src/deepstack_serving/triton_bridge.py"]


def test_model_families_are_named_in_families_only() -> None:
    others = [path for path in SOURCES if group_of(path) != "families"]
    assert offenders(others, lambda path: re.findall(r"qwen|granite", path.read_text(), re.IGNORECASE)) == []


def test_every_module_says_what_it_is() -> None:
    assert offenders(MODULES, lambda path: ast.get_docstring(ast.parse(path.read_text())) is None) == []


def test_files_are_at_most_300_lines() -> None:
    assert offenders((*SOURCES, *CLIENT, *OTHER), lambda path: lines(path) if lines(path) > 300 else 0) == []


def test_functions_are_at_most_40_lines() -> None:
    def long_functions(path: Path) -> list[str]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
        return [node.name for node in found if (node.end_lineno or 0) - node.lineno >= 40]

    assert offenders((*SOURCES, *CLIENT, *TESTS), long_functions) == []


def test_only_the_bridge_catches_everything() -> None:
    def broad(path: Path) -> list[int]:
        handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
        return [node.lineno for node in handlers if node.type is None or names_in(node.type) & BROAD]

    assert offenders([path for path in SOURCES if path.name != "triton_bridge.py"], broad) == []


def names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_only_settings_read_the_environment() -> None:
    """`serve` and `embedded` hand an environment on to the server's process."""
    others = [path for path in (*SOURCES, *ADAPTERS) if path.name != "settings.py" and group_of(path) not in BESIDE]
    reads = r"\bos\.(?:environ|getenv)\b|from os import"
    assert offenders(others, lambda path: re.findall(reads, path.read_text())) == []


def test_nothing_changes_the_import_path() -> None:
    names = "sys" + r"\.path|PYTHON" + "PATH"
    everything = (*SOURCES, *ADAPTERS, *CLIENT, *OTHER)
    assert offenders(everything, lambda path: re.findall(names, path.read_text())) == []


def test_callers_mistakes_are_not_asserted() -> None:
    def asserts(path: Path) -> list[int]:
        return [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]

    assert offenders(SOURCES, asserts) == []
