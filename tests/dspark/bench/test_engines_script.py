"""The script that compares engines, with scripted systems in place of those that load a model."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cluster.api import dspark_v1_pb2 as pb
from cluster.errors import Unavailable
from dspark.async_client import AsyncClient
from dspark.bench.asks import Ask, Mix
from dspark.bench.interleaved import Timing, repeat_seed
from tests.conftest import REPO
from tests.dspark.bench.made_samples import make_prompt
from tests.dspark.fake_server import FakeDSpark, running
from tests.waiting import eventually
from verifier_service.engine import StepShape

MIX = Mix(prompts=[make_prompt(f"prompt {i}") for i in range(50)], max_tokens=(4, 6))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of `benchmarks/`."""
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    import decode_bound  # type: ignore[import-not-found]
    import engines  # type: ignore[import-not-found]
    import systems  # type: ignore[import-not-found]
    import systems_bench  # type: ignore[import-not-found]
    import verify_steps  # type: ignore[import-not-found]
    import vllm_alone  # type: ignore[import-not-found]
    import vllm_served  # type: ignore[import-not-found]

    monkeypatch.setattr(systems_bench, "AWAKE_S", 0.0)
    monkeypatch.setattr(systems_bench, "WARM_UP", Timing(settle_s=0.0, measure_s=0.01))
    return SimpleNamespace(
        bound=decode_bound,
        engines=engines,
        systems=systems,
        bench=systems_bench,
        steps=verify_steps,
        alone=vllm_alone,
        served=vllm_served,
    )


# --- vLLM behind its own server: what its stream says -------------------------------------------


def test_events_of_vllms_stream_are_chunks(scripts: SimpleNamespace) -> None:
    def event(**changes: Any) -> dict[str, Any]:
        choice = {"text": "ab", "token_ids": [5, 6], "finish_reason": None} | changes
        return {"choices": [choice]}

    chunk = scripts.served.chunk_of(event())
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("ab", (5, 6), "")
    last = scripts.served.chunk_of(event(text="", token_ids=None, finish_reason="length"))
    assert (last.token_ids, last.finish_reason) == ((), "length")
    with pytest.raises(Unavailable, match="too long"):
        scripts.served.chunk_of({"error": {"message": "too long"}})


# --- vLLM alone: the closed loop around its engine ------------------------------------------------


@dataclass
class FakeRequest:
    name: str
    prompt_token_ids: list[int]
    left: int
    fresh: bool = True


class FakeVllm:
    """An engine whose steps take 10 ms of a clock of its own and give every request two tokens."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.requests: dict[str, FakeRequest] = {}
        self.aborted: list[str] = []

    def add_request(self, name: str, prompt: list[int], params: int) -> None:
        assert name not in self.requests
        self.requests[name] = FakeRequest(name, prompt, params)

    def abort_request(self, names: Sequence[str]) -> None:
        self.aborted += names
        for name in names:
            del self.requests[name]

    def step(self) -> list[Any]:
        self.now_s += 0.01
        outputs = []
        for request in list(self.requests.values()):
            num = min(2, request.left)
            request.left -= num
            outputs.append(
                SimpleNamespace(
                    request_id=request.name,
                    prompt_token_ids=request.prompt_token_ids,
                    num_cached_tokens=3 if request.fresh else None,
                    outputs=[SimpleNamespace(token_ids=[7] * num)],
                    finished=request.left == 0,
                )
            )
            request.fresh = False
            if not request.left:
                del self.requests[request.name]
        return outputs


def test_vllm_alone_is_asked_and_counted_as_a_block_is(scripts: SimpleNamespace) -> None:
    engine = FakeVllm()
    asks: list[Ask] = []

    def prompt_of(ask: Ask) -> list[int]:
        asks.append(ask)
        return [1, 2, 3, 4, 5]

    alone = scripts.alone.Alone(
        engine, prompt_of, lambda ask: ask.max_tokens, clock=lambda: engine.now_s
    )
    order = scripts.alone.BlockOrder(
        mix=MIX,
        repeat=2,
        users=3,
        timing=Timing(settle_s=0.05, measure_s=1.0),
        name="vllm",
    )
    block = alone.measure(order)
    assert (block["repeat"], block["users"], block["setting"]) == (2, 3, "vllm")
    assert block["measured_s"] == pytest.approx(1.0, abs=0.02)
    # Two tokens a step and user, but for the last step of an answer of odd length.
    assert block["tokens_per_s_total"] == pytest.approx(3 * 200, rel=0.1)
    assert block["tokens_per_s_user"] == pytest.approx(200, rel=0.1)
    assert block["counters"]["num_steps"] == pytest.approx(100, abs=2)
    assert block["counters"]["step_s"] == pytest.approx(1.0, abs=0.03)
    begun = block["counters"]["num_prefill_tokens"] / 2  # five tokens, three of them cached
    assert begun == pytest.approx(len(asks), rel=0.2)
    assert not engine.requests, "nothing is left behind"
    assert len(engine.aborted) == 3
    asked = [(ask.prompt.text, ask.seed) for ask in asks[:3]]
    assert asked == [(a.prompt.text, a.seed) for a in first_asks(order)], "what every system is"
    again = alone.measure(order)
    assert again["tokens"] == pytest.approx(block["tokens"], abs=6), "steps end as edges do"


def first_asks(order: Any) -> list[Ask]:
    mix = replace(order.mix, seed=repeat_seed(order.mix.seed, order.repeat))
    return [mix.ask(user, 0, midway=True) for user in range(order.users)]


async def test_a_vllm_that_does_not_load_says_why(scripts: SimpleNamespace, tmp_path: Path) -> None:
    system = scripts.systems.AloneSystem(
        "vllm",
        scripts.alone.Settings(
            target=tmp_path / "missing",
            threads=1,
            max_model_len=64,
            max_requests=1,
            kv_tokens=64,
            ngram=False,
            compiled=False,
        ),
    )
    try:
        with pytest.raises(Unavailable, match=r"^vllm: \w+: "):
            await system.start()
    finally:
        await system.close()
    assert scripts.systems.tree(system.pid) == []


# --- holding systems ------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[SimpleNamespace]:
    """A system of a shell and its child."""
    process = subprocess.Popen(["sh", "-c", "sleep 60; true"])
    yield SimpleNamespace(pid=process.pid)
    for each in psutil.Process(process.pid).children():
        each.kill()
    process.kill()
    process.wait()


async def test_a_held_system_stands_still_with_all_its_processes(
    scripts: SimpleNamespace, sleeper: SimpleNamespace
) -> None:
    def states() -> set[str]:
        return {process.status() for process in scripts.systems.tree(sleeper.pid)}

    await eventually(lambda: len(scripts.systems.tree(sleeper.pid)) == 2)
    scripts.systems.hold(sleeper)
    await eventually(lambda: states() == {psutil.STATUS_STOPPED})
    scripts.systems.let_go(sleeper)
    await eventually(lambda: states() == {psutil.STATUS_SLEEPING})
    assert scripts.systems.cpu_s(sleeper) >= 0.0
    assert scripts.systems.cpu_s(SimpleNamespace(pid=None)) == 0.0


# --- the bound ------------------------------------------------------------------------------------


class Counting(FakeDSpark):
    """Each look at its counters finds two more rows of 10 ms, which gave three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = dict.fromkeys(("num_verify_rows", "num_emitted", "num_verified"), 0.0)
        self.metrics |= {"step_s": 0.0, "live": 0.0}
        self.profile = '{"drafters": [{"draft_s": {"1": 0.005}}, {"draft_s": {}}]}'

    def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:  # noqa: N802
        self.metrics["num_verify_rows"] += 2
        self.metrics["num_emitted"] += 3
        self.metrics["step_s"] += 0.02
        answer: pb.GetModelResponse = super().GetModel(request, context)
        return answer


async def test_the_bound_is_accepted_length_over_verify_step(scripts: SimpleNamespace) -> None:
    fake = Counting()
    fake.pause_s = 0.02
    with running(fake) as address:
        async with AsyncClient(address) as client:
            probes = [
                await scripts.bound.probe(client, MIX, repeat=repeat, num_answers=3)
                for repeat in range(2)
            ]
    found = scripts.bound.bound_of(probes)
    assert found["accepted_length"] == pytest.approx(1.5)
    assert found["verify_step_s"] == pytest.approx(0.01)
    assert found["bound_tokens_per_s"] == pytest.approx(150)
    assert found["serial_bound_tokens_per_s"] == pytest.approx(100)
    # Two messages of a token behind the first, 20 ms and more each.
    assert 10 < found["measured_tokens_per_s"] <= 50
    assert found["share"] == pytest.approx(found["measured_tokens_per_s"] / 150)
    assert found["between_s"] == pytest.approx(1 / found["measured_tokens_per_s"] - 0.01)
    seeds = {request.sampling.seed for request in fake.requests}
    assert len(seeds) == 6, "every answer is another"


# --- step times -----------------------------------------------------------------------------------


def test_step_times_are_of_the_shape_they_say(scripts: SimpleNamespace) -> None:
    seen: list[StepShape] = []

    def vllm(shape: StepShape) -> float:
        seen.append(shape)
        return 0.02

    rows = list(scripts.steps.rows({"vllm": vllm, "torch": lambda _: 0.01}, 3))
    assert [(row["requests"], row["drafts"]) for row in rows] == list(
        itertools.product(scripts.steps.REQUESTS, scripts.steps.DRAFTS)
    )
    assert [(s.num_rows, s.row_tokens) for s in seen[::4]] == [
        (row["requests"], row["drafts"] + 1) for row in rows
    ]
    assert rows[0]["vllm"] == {"median_ms": 20.0, "quartiles_ms": [20.0, 20.0], "least_ms": 20.0}
    assert "vllm 20.0 ms" in scripts.steps.line(rows[0])


# --- the whole script -----------------------------------------------------------------------------


class Scripted:
    """A system at so many tokens/s for each user; ``fails_at`` names the measurement that fails."""

    pid = None

    def __init__(self, name: str, rate: float, *, fails_at: int = -1) -> None:
        self.name, self.rate, self.fails_at = name, rate, fails_at
        self.measured: list[tuple[int, int]] = []
        self.closed = False

    async def start(self) -> dict[str, Any]:
        if self.fails_at == 0:
            raise Unavailable(f"{self.name}: no such thing")
        return {"made": True}

    async def measure(self, mix: Mix, *, repeat: int, users: int, timing: Timing) -> dict[str, Any]:
        self.measured.append((repeat, users))
        if len(self.measured) == self.fails_at:
            raise Unavailable("gone")
        return {
            "repeat": repeat,
            "users": users,
            "setting": self.name,
            "tokens_per_s_total": self.rate * users,
            "tokens_per_s_user": self.rate,
            "accepted_length": None if self.name == "vllm" else 1.5,
            "measured_s": 1.0,
            "counters": {"num_prefill_tokens": 10.0},
        }

    async def close(self) -> None:
        self.closed = True


def run(
    scripts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    made: list[Scripted],
    *more: str,
) -> int:
    monkeypatch.setattr(scripts.engines, "make_systems", lambda args: made)
    names = [system.name for system in made]
    command = ["engines.py", "--out", str(out), "--concurrency", "1", "2", "--only", *names]
    monkeypatch.setattr("sys.argv", [*command, *more])
    code: int = scripts.engines.main()
    return code


def trio(*, ngram_fails_at: int = -1) -> list[Scripted]:
    return [
        Scripted("vllm", 10.0),
        Scripted("vllm n-gram", 11.0, fails_at=ngram_fails_at),
        Scripted("ours on vllm", 13.0),
    ]


def test_systems_take_turns_and_a_stopped_run_goes_on(
    scripts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "engines.json"
    made = trio()
    assert run(scripts, monkeypatch, out, made, "--repeats", "2") == 0
    report = json.loads(out.read_text())
    assert len(report["blocks"]) == 2 * 2 * 3
    assert all(system.closed for system in made)
    assert made[0].measured[0] == (-1, 2), "a first block that does not count"
    orders = {
        tuple(b["setting"] for b in report["blocks"] if (b["repeat"], b["users"]) == place)
        for place in itertools.product(range(2), (1, 2))
    }
    assert len(orders) > 1
    ratios = {(r["to"], r["users"]): r for r in report["summary"]["ours_to"]}
    assert ratios["vllm", 1]["ratio"] == pytest.approx(1.3)
    assert ratios["vllm", 1]["required"] == 1.2
    assert ratios["vllm", 1]["holds"] is True
    assert "holds" not in ratios["vllm", 2]
    rate = next(r for r in report["summary"]["rates"] if (r["setting"], r["users"]) == ("vllm", 2))
    assert rate["tokens_per_s_total"] == 20.0
    assert rate["tokens_per_s_user_quartiles"] == [10.0, 10.0]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path) not in out.read_text(), "no path of this machine"
    assert "ours on vllm / vllm          = 1.300" in capsys.readouterr().out

    made = trio()
    assert run(scripts, monkeypatch, out, made, "--repeats", "2") == 0
    assert not made[0].measured, "everything is there already"
    assert run(scripts, monkeypatch, out, trio(), "--repeats", "3") == 0
    longer = json.loads(out.read_text())["blocks"]
    assert longer[:12] == report["blocks"]
    assert {block["repeat"] for block in longer[12:]} == {2}
    assert run(scripts, monkeypatch, out, trio(), "--seed", "5") == 2
    assert "of another plan" in capsys.readouterr().err


@pytest.mark.parametrize(("fails_at", "blocks"), [(0, 0), (3, 1)])
def test_a_system_that_fails_is_left_out_and_told(
    scripts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fails_at: int,
    blocks: int,
) -> None:
    out = tmp_path / "engines.json"
    made = trio(ngram_fails_at=fails_at)
    assert run(scripts, monkeypatch, out, made, "--repeats", "1") == 0
    report = json.loads(out.read_text())
    settings = [block["setting"] for block in report["blocks"]]
    assert (settings.count("vllm n-gram"), settings.count("vllm")) == (blocks, 2)
    reason = "no such thing" if fails_at == 0 else "users: gone"
    assert reason in report["failures"]["vllm n-gram"]
    assert "vllm n-gram" in capsys.readouterr().out
    assert made[1].closed


def test_nothing_that_runs_is_an_error(
    scripts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = [Scripted("vllm", 1.0, fails_at=0)]
    assert run(scripts, monkeypatch, tmp_path / "e.json", made) == 2
    assert "no system runs here" in capsys.readouterr().err


def test_both_sides_get_the_same_room(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scripts.engines, "ensure_model", lambda name: tmp_path / name)
    args = SimpleNamespace(
        port=9000, threads=1, concurrency=[1, 48], only=list(scripts.engines.NAMES)
    )
    made = {system.name: system for system in scripts.engines.make_systems(args)}
    assert set(made) == set(scripts.engines.NAMES)
    settings = made["vllm"]._settings
    config = made["ours on vllm"]._config
    assert settings.max_requests == config.verifier.max_requests == 48
    assert settings.kv_tokens == config.verifier.kv_tokens
    assert settings.threads == config.verifier.num_threads == config.drafter.num_threads == 1
    assert settings.max_model_len == config.model.max_model_len
    assert made["ours on torch"]._config.verifier.engine == "torch"
    assert made["ours on torch"]._config.cluster.grpc_port != config.cluster.grpc_port
    assert made["vllm n-gram"]._settings.ngram
    assert made["vllm compiled"]._settings.compiled


def test_what_is_imported_leaves_threads_to_be_set(scripts: SimpleNamespace) -> None:
    """OpenMP reads its number of threads when torch is loaded: not before a child has set it."""
    code = "import sys, engines; sys.exit('torch' in sys.modules)"
    folder = Path(scripts.engines.__file__).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, check=False).returncode == 0
