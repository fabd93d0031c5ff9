"""`dspark profile`: a replica measured here, and the tables of a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.profile_snapshot import ProfileSnapshot
from dspark.cli import main
from router.step_load import StepLoad
from router.throughput import ThroughputProfile
from tests.dspark.fake_server import FakeDSpark
from tests.text_targets import write_text_target

PNG = b"\x89PNG\r\n"


@pytest.fixture
def told(fake: FakeDSpark) -> dict[str, Any]:
    """What the fake server answers: one verifier with steps behind it, one drafter without."""
    profile = ThroughputProfile(
        np.array([1, 8, 64], np.int32), np.array([0.04, 0.05, 0.2], np.float32), fingerprint="m/p/1"
    )
    for i in range(100):
        tokens = 1 + i % 64
        profile.record(StepLoad(num_rows=1, num_tokens=tokens), 0.1 + 0.3 * (i * i % 7))
    report = {
        "router": "router-0",
        "routers": ["router-0", "router-1"],
        "verifiers": [
            {"verifier": name, "router": router, "profile": profile.snapshot().to_json()}
            for name, router in (("verifier-7", "router-0"), ("verifier-8", "router-1"))
        ],
        "unanswered": [{"router": "router-2", "why": "no answer within 5 s"}],
        "untold": [
            {"verifier": "verifier-9", "router": "router-2"},
            {"verifier": "verifier-10", "router": ""},
        ],
        "drafters": [
            {
                "drafter": "drafter-3",
                "router": "router-1",
                "sessions": 2,
                "num_samples": 9,
                "round_trip_s": 0.0031,
                "deviation_s": 0.001,
                "draft_s": {"1": 0.004, "4": 0.0061},
            },
            {"drafter": "drafter-4", "sessions": 0, "num_samples": 0, "round_trip_s": None},
        ],
    }
    fake.profile = json.dumps(report)
    return report


def test_the_tables_of_a_server(
    told: dict[str, Any], address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "tables.json", tmp_path / "tables.png"
    argv = ["profile", "--address", address, "--json", str(out), "--picture", str(picture)]
    assert main(argv) == 0
    shown, warned = capsys.readouterr()
    assert warned.splitlines() == [
        "warning: router router-2 did not answer: no answer within 5 s",
        "warning: nothing known of verifier verifier-9: router router-2 leads it",
        "warning: nothing known of verifier verifier-10: no router leads it",
    ]
    for word in ("verifier-7", "verifier-8", "m/p/1", "100 steps", "alarm: error", "drafter-3"):
        assert word in shown
    assert "6.1" in shown
    assert "router-1" in shown
    assert "drafter-4" in shown
    assert "not known" in shown
    assert json.loads(out.read_text()) == told
    assert picture.read_bytes().startswith(PNG)
    assert main(argv) == 0, "its own report may be written over"


def test_a_router_without_verifiers(
    fake: FakeDSpark, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--address", address]) == 0
    assert "no router leads a verifier" in capsys.readouterr().out
    fake.profile = '{"verifiers": [{"verifier": "v"}]}'
    assert main(["profile", "--address", address]) == 2
    fake.profile = '{"verifiers": [{"verifier": "v", "profile": {}}]}'
    assert main(["profile", "--address", address]) == 2


def test_a_replica_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_text_target(tmp_path / "target")
    out, picture = tmp_path / "p.json", tmp_path / "p.png"
    argv = ["profile", "--target", str(folder), "--budget", "0.5", "--steps", "0.2"]
    argv += ["--threads", "1", "--json", str(out), "--picture", str(picture)]
    assert main(argv) == 0
    assert "tokens" in capsys.readouterr().out
    [verifier] = json.loads(out.read_text())["verifiers"]
    profile = ProfileSnapshot.from_json(verifier["profile"])
    assert profile.num_steps > 0
    assert profile.spread > 0
    assert profile.tokens[0] == 1
    assert profile.tokens[-1] == 512
    assert "1 threads float32" in profile.fingerprint
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--target", "x", "--budget", "0"], "profile_budget_s"),
        (["--target", "x", "--engine", "abacus"], "verifier.engine"),
        (["--target", "x", "--threads", "-1"], "num_threads"),
        (["--target", "x", "--steps", "-1"], "--steps"),
        (["--target", "x", "--steps", "nan"], "--steps"),
        (["--target", "x", "--steps", "inf"], "--steps"),
        (["--target", "x", "--application", "a"], "--application"),
        (["--address", "x", "--budget", "3"], "--budget"),
        (["--address", "x", "--seed", "0"], "--seed"),
        (["--target", "x", "--picture", "no/such/folder.png"], "--picture"),
        (["--target", "x", "--picture", "picture.gif"], "--picture"),
        (["--target", "x", "--json", "."], "--json"),
    ],
)
def test_mistakes_are_found_before_the_work(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *argv]) == 2
    assert named in capsys.readouterr().err


def test_what_to_profile_must_be_said() -> None:
    with pytest.raises(SystemExit):
        main(["profile"])
    with pytest.raises(SystemExit):
        main(["profile", "--target", "a", "--address", "b"])
