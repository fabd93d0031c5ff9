"""What `dspark plan` is asked: traffic, promises, models, priced devices. Parsed once, strictly.

Read from YAML by the rules of the configuration (`cluster.config`): unknown keys, wrong types and
values out of range are refused with a `ConfigError` that names the path. ``acceptance.domains`` may
be a name of `presets.DOMAINS` in place of a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config import SchedulingConfig
from cluster.errors import ConfigError
from cluster.sections import natural, parse_section, positive
from cluster.yaml_text import read_yaml
from deploy.simulation.acceptance import AcceptanceModel
from deploy.simulation.examples import PLANS, example
from deploy.simulation.prices import DeviceSpec, KernelSpec, ModelSize
from deploy.simulation.rates_pool import Target
from deploy.simulation.rates_steps import LengthMix
from deploy.simulation.scenario import with_presets
from deploy.simulation.specs import LinkSpec
from deploy.simulation.traces import LengthSpec, TraceSpec, read_trace


@dataclass(frozen=True, kw_only=True)
class TrafficSpec:
    """Who asks for how much. Lengths of a trace file are those that it holds."""

    requests_per_s: float = natural(0)
    """Mean of Poisson arrivals; 0: by the trace."""
    trace: str = ""
    """File of recorded requests, see `traces.TraceSpec`; pools are sized for its busiest window."""
    window_s: float = positive(60.0)
    """Of the trace: a rate is a mean over so long."""
    prompt: LengthSpec = field(default_factory=lambda: LengthSpec(mean=512))
    output: LengthSpec = field(default_factory=lambda: LengthSpec(mean=256))

    def __post_init__(self) -> None:
        if (self.requests_per_s > 0) == bool(self.trace):
            raise ConfigError(
                "traffic: give either requests_per_s, over 0, or a trace", hint="not both"
            )


@dataclass(frozen=True, kw_only=True)
class SloSpec:
    """What requests are promised."""

    ttft_s: float = positive(2.0)
    """To the first token."""
    tokens_per_s: float = natural(0)
    """Of each request, after its first token."""
    inter_token_s: float = natural(0)
    """The same, the other way round; give one of the two or none."""
    attainment: float = field(default=0.95, metadata={"over": 0, "most": 1.0})
    """Share of requests for which both must hold."""

    def __post_init__(self) -> None:
        if self.tokens_per_s and self.inter_token_s:
            raise ConfigError("slo: tokens_per_s and inter_token_s say the same; give one of them")

    @property
    def target(self) -> Target:
        """As the rate model takes it."""
        rate = 1 / self.inter_token_s if self.inter_token_s else self.tokens_per_s
        return Target(ttft_s=self.ttft_s, tokens_per_s=rate)


@dataclass(frozen=True, kw_only=True)
class LimitSpec:
    """What a deployment may not exceed."""

    max_verifiers: int = positive(256, most=4096)
    max_drafters: int = positive(256, most=4096)
    max_requests: int = positive(256, most=4096)
    """At a time in one verifier (``verifier.max_requests``)."""
    prefill_budget: int = positive(512)
    """Prompt tokens per step (``router.prefill_budget``)."""


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Root of the tree."""

    title: str = ""
    traffic: TrafficSpec = field(default_factory=lambda: TrafficSpec(requests_per_s=1.0))
    slo: SloSpec = field(default_factory=SloSpec)
    target: ModelSize = field(default_factory=ModelSize)
    drafter: ModelSize = field(
        default_factory=lambda: ModelSize(weights_gb=1.0, active_b=0.5, kv_bytes_per_token=20480.0)
    )
    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    kernels: KernelSpec = field(default_factory=KernelSpec)
    links: LinkSpec = field(default_factory=LinkSpec)
    limits: LimitSpec = field(default_factory=LimitSpec)
    devices: tuple[DeviceSpec, ...] = ()

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise ConfigError("devices: two of one name")
        if not any(device.verifies for device in self.devices):
            raise ConfigError("devices: none that verifies", hint="list at least one device")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the pools have to bear."""

    lengths: LengthMix
    peak_per_s: float
    """Requests per second that they are sized for."""
    windows_per_s: tuple[float, ...]
    """Requests per second, window by window; one for steady traffic."""
    window_s: float


def built_in(name: str) -> Path:
    """The file of an example that comes with the package.

    Raises:
        ConfigError: there is none of this name.
    """
    return example(PLANS, name)


def load_plan(source: Path | Mapping[str, Any]) -> PlanSpec:
    """Read a file, or take a mapping.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, value out of range.
    """
    if isinstance(source, Path):
        tree = read_yaml(source)
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{source} holds no plan", hint="KEY: VALUE lines, as in deploy/simulation/plans"
            )
    else:
        tree = dict(source)
    return parse_section(PlanSpec, with_presets(tree), "")


def traffic_of(spec: TrafficSpec) -> Traffic:
    """Rates and lengths; a trace is counted in windows.

    Raises:
        ConfigError: a trace that cannot be read.
    """
    if not spec.trace:
        return Traffic(
            lengths=LengthMix(prompt=spec.prompt, output=spec.output),
            peak_per_s=spec.requests_per_s,
            windows_per_s=(spec.requests_per_s,),
            window_s=spec.window_s,
        )
    arrivals = read_trace(TraceSpec(kind="file", path=spec.trace))
    last = max(arrival.at_s for arrival in arrivals)
    counts = np.bincount(
        [int(arrival.at_s / spec.window_s) for arrival in arrivals],
        minlength=int(last / spec.window_s) + 1,
    )
    # The last window is rarely whole: a mean over a part of it is no rate.
    whole = counts[:-1] if len(counts) > 1 else counts
    rates = tuple((whole / spec.window_s).tolist())
    return Traffic(
        lengths=LengthMix(
            prompt=_law([arrival.num_prompt for arrival in arrivals]),
            output=_law([arrival.num_output for arrival in arrivals]),
        ),
        peak_per_s=max(rates),
        windows_per_s=rates,
        window_s=spec.window_s,
    )


def _law(lengths: list[int]) -> LengthSpec:
    """A lognormal law of the same mean and mean square, which is what rates depend on."""
    data = np.array(lengths, np.float64)
    ratio = float((data**2).mean() / data.mean() ** 2)
    return LengthSpec(mean=float(data.mean()), spread=min(float(np.sqrt(np.log(ratio))), 3.0))
