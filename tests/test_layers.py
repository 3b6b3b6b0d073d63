"""The order of imports is the law of the layout: data flows one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = [
    "frozen",
    "units",
    "errors",
    "catalog",
    "paths",
    "config",
    "records",
    "quantization",
    "checkpoint",
    "architecture",
    "workload",
    "dataset",
    "memory",
    "ledger",
    "engines",
    "system",
    "machine",
    "speed",
    "plan",
    "measurement",
    "report",
    "runtime",
    "cli",
    "__main__",
]
RUNTIME_ONLY = {"mlx", "mlx_lm", "transformers", "tokenizers"}
HEAVY = {
    *RUNTIME_ONLY,
    "gguf",
    "httpx",
    "huggingface_hub",
    "numpy",
    "platformdirs",
    "psutil",
    "rich",
    "typer",
}
MODULES = sorted((ROOT / "uma").rglob("*.py"))


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "uma").with_suffix("").parts
    return parts[0]


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_from_its_own_layer_and_those_before(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        return
    used = {name.split(".")[1] for name in imports_of(path) if name.startswith("uma.")}
    used &= set(ORDER) | {p.name for p in (ROOT / "uma").iterdir()}
    assert layer in ORDER, f"{layer} has no place in the order"
    late = {name for name in used if ORDER.index(name) > ORDER.index(layer)}
    assert not late, f"{layer} imports from later layers: {late}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_runtime_imports_mlx(path: Path) -> None:
    if layer_of(path) == "runtime":
        return
    used = {name.split(".")[0] for name in imports_of(path)}
    assert not used & RUNTIME_ONLY


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_importing_uma_pulls_nothing_heavy() -> None:
    assert not modules_after("import uma") & HEAVY


@pytest.mark.parametrize(
    "module",
    ["uma.catalog", "uma.checkpoint", "uma.architecture", "uma.engines.mlx", "uma.plan.inference"],
)
def test_the_estimator_needs_no_heavy_module(module: str) -> None:
    assert not modules_after(f"import {module}") & HEAVY
