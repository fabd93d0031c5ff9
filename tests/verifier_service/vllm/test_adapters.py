"""LoRA folders, judged before vLLM is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ConfigError
from verifier_service.vllm.adapters import adapter_ranks


def write(folder: Path, config: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    return str(folder)


def test_the_largest_rank_of_each(tmp_path: Path) -> None:
    """Of a pattern too: some modules may have another."""
    adapters = {
        "law": write(tmp_path / "law", {"r": 8}),
        "poem": write(tmp_path / "poem", {"r": 4, "rank_pattern": {"q_proj": 32, "v_proj": 2}}),
        "plain": write(tmp_path / "plain", {"r": 1, "rank_pattern": None}),
    }
    assert adapter_ranks(adapters) == {"law": 8, "poem": 32, "plain": 1}
    assert adapter_ranks({}) == {}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ({}, "ranks"),
        ({"r": 0}, "ranks"),
        ({"r": "8"}, "ranks"),
        ({"r": True}, "ranks"),
        ({"r": 8, "rank_pattern": {"q_proj": -1}}, "ranks"),
        ({"r": 8, "rank_pattern": [8]}, "ranks"),
    ],
)
def test_a_bad_adapter_is_named(tmp_path: Path, config: Any, says: str) -> None:
    folder = write(tmp_path / "law", config)
    with pytest.raises(ConfigError, match=rf"verifier\.adapters\.law: .*{says}"):
        adapter_ranks({"law": folder})


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verifier\.adapters\.law: .* is not a LoRA folder"):
        adapter_ranks({"law": str(tmp_path)})
    with pytest.raises(ConfigError, match="is not a LoRA folder"):
        adapter_ranks({"law": str(tmp_path / "missing")})
