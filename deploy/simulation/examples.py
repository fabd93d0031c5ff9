"""YAML files that come with the package: scenarios and plans to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cluster.errors import ConfigError

SCENARIOS: Final = Path(__file__).parent / "scenarios"
PLANS: Final = Path(__file__).parent / "plans"


def example(folder: Path, name: str) -> Path:
    """The file of this name, which has no ending.

    Raises:
        ConfigError: there is none.
    """
    path = folder / f"{name}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        kind = folder.name.removesuffix("s")
        raise ConfigError(f"no {kind} {name!r}", hint=f"a YAML file, or one of {names}")
    return path
