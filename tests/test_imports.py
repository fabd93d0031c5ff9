"""Imports run one way, and the client's import path stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

ALLOWED = {
    "cluster": {"cluster"},
    "router": {"cluster", "router"},
    "drafter_service": {"cluster", "drafter_service"},
    "verifier_service": {"cluster", "verifier_service"},
    "deploy": {"cluster", "router", "drafter_service", "verifier_service", "deploy"},
    "dspark": {"cluster", "drafter_service", "deploy", "dspark"},
}
"""Package -> packages of ours that it may import; `dspark train` is drafter_service's."""


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, at its head or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package: str) -> None:
    files = sorted((REPO / package).rglob("*.py"))
    assert files
    for path in files:
        ours = imported(path) & ALLOWED.keys()
        assert ours <= ALLOWED[package], f"{path.relative_to(REPO)} imports {ours}"


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import dspark",
        "import dspark.cli",
        "import dspark.commands.generate",
        "import dspark.commands.scheduling",
        "import dspark.commands.bench, dspark.bench.report, dspark.bench.interleaved",
    ],
)
def test_the_client_is_light(statement: str) -> None:
    heavy = {"torch", "ray", "transformers", "safetensors", "huggingface_hub"}
    loaded = loaded_after(statement)
    assert "dspark" in loaded
    assert not loaded & heavy


def test_the_store_and_the_text_side_need_no_torch() -> None:
    statement = "import cluster.model_store, deploy.text_model, deploy.requests"
    assert not loaded_after(statement) & {"torch", "ray", "transformers"}


def test_the_public_surface_is_what_it_says() -> None:
    import dspark

    assert set(dspark.__all__) == {
        "AsyncClient", "AsyncGeneration", "Chunk", "Client", "DSparkError", "Generation", "Model",
        "Options", "Usage",
    }  # fmt: skip
    assert all(hasattr(dspark, name) for name in dspark.__all__)


def test_environment_variables_are_read_in_one_place() -> None:
    readers = {
        path.relative_to(REPO).as_posix()
        for package in ALLOWED
        for path in (REPO / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert readers == {"cluster/environment.py"}


def test_no_frame_passes_through_a_serve_handle() -> None:
    """Calls by ``.remote`` go to the directory actor and nowhere else."""
    callers = {
        path.relative_to(REPO).as_posix()
        for package in ALLOWED
        for path in (REPO / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("remote", "broadcast")
    }
    assert callers == {"cluster/directory.py"}
