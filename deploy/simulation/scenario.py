"""A scenario: everything that a simulated run depends on, parsed once, strictly.

Read from YAML like the configuration of a cluster: unknown keys, wrong types and values out of
range are refused. A key ``verifier.curve`` may be a name of `presets.CURVES` or a JSON file of
``dspark profile``, and ``acceptance.domains`` a name of `presets.DOMAINS` or a JSON file of
``dspark eval`` (read at the section's regime, temperature 0 or 1), in place of a section.
``variants`` and ``points`` make a sweep: every variant is run at every point.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.config import RouterConfig
from cluster.errors import ConfigError
from cluster.sections import natural, parse_section, positive
from cluster.yaml_text import parse_yaml, read_yaml, yaml_float
from deploy.simulation.acceptance import AcceptanceModel, Domain, evaluated_domains
from deploy.simulation.curves import profiled_curve, seconds
from deploy.simulation.examples import SCENARIOS, example
from deploy.simulation.presets import CURVES, DOMAINS
from deploy.simulation.specs import DrafterSpec, Fault, LinkSpec, VerifierSpec
from deploy.simulation.traces import TraceSpec


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run it: values that differ from the scenario's."""

    name: str = ""
    set: tuple[str, ...] = ()
    """``section.key=value``, the value as YAML."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Root of the tree. A cell is one router with its lanes and drafters; cells are alike, share
    the traffic evenly and do not know of each other."""

    title: str = ""
    seed: int = natural(0)
    duration_s: float = positive(30.0)
    """End of the run, in virtual time."""
    warmup_s: float = seconds(5.0)
    """Start of what is counted."""
    cells: int = positive(1)
    router: RouterConfig = field(default_factory=RouterConfig)
    verifier: VerifierSpec = field(default_factory=VerifierSpec)
    drafter: DrafterSpec = field(default_factory=DrafterSpec)
    links: LinkSpec = field(default_factory=LinkSpec)
    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    trace: TraceSpec = field(default_factory=TraceSpec)
    faults: tuple[Fault, ...] = ()
    scale_period_s: float = positive(10.0)
    """An autoscaler is asked so often."""
    points: tuple[float, ...] = ()
    """Load levels of a sweep: users of closed loops, requests per second of open ones, the time
    scale of recorded traffic; empty: as ``trace`` says."""
    variants: tuple[Variant, ...] = (Variant(name="default"),)

    def __post_init__(self) -> None:
        if self.warmup_s >= self.duration_s:
            raise ConfigError(
                f"warmup_s: {self.warmup_s} leaves nothing of duration_s, {self.duration_s}",
                hint="what comes before warmup_s is not counted: set both",
            )
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) != len(names):
            raise ConfigError(
                "variants: none, or two of one name", hint="give each a name of its own"
            )
        self._check_faults()

    def _check_faults(self) -> None:
        """A fault that hits nothing is a mistake."""
        for n, fault in enumerate(self.faults):
            pool = self.verifier if "verifier" in fault.kind else self.drafter
            if fault.kind != "lost_blocks" and fault.index >= pool.num_replicas:
                raise ConfigError(
                    f"faults[{n}].index: {fault.index} of {pool.num_replicas} replicas",
                    hint="counted from 0 within the cell",
                )
            if any(not 0 <= cell < self.cells for cell in fault.cells):
                raise ConfigError(
                    f"faults[{n}].cells: {', '.join(map(str, fault.cells))} of {self.cells} cells",
                    hint="counted from 0",
                )


def load_scenario(source: Path | Mapping[str, Any], settings: Iterable[str] = ()) -> Scenario:
    """Read a file, or take a mapping, and change values.

    Args:
        settings: ``section.key=value``.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, value out of range.
    """
    tree: dict[str, Any] = _read(source) if isinstance(source, Path) else dict(source)
    tree = copy.deepcopy(tree)
    for setting in settings:
        _set(tree, setting)
    return parse_section(Scenario, with_presets(tree), "")


def built_in(name: str) -> Path:
    """The file of a scenario that comes with the package.

    Raises:
        ConfigError: there is none of this name.
    """
    return example(SCENARIOS, name)


def runs_of(source: Path | Mapping[str, Any], settings: Iterable[str] = ()) -> list[Run]:
    """All runs of a scenario's sweep, point by point.

    Raises:
        ConfigError: as `load_scenario`.
    """
    settings = list(settings)
    base = load_scenario(source, settings)
    runs = []
    for point in base.points or (None,):
        for variant in base.variants:
            extra = [] if point is None else [_point_setting(base, point)]
            scenario = load_scenario(source, [*settings, *extra, *variant.set])
            runs.append(Run(variant=variant.name, point=point, scenario=scenario))
    return runs


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep."""

    variant: str
    point: float | None
    scenario: Scenario


def _point_setting(base: Scenario, point: float) -> str:
    if base.trace.kind in ("closed", "staggered"):
        if not point.is_integer():
            raise ConfigError(
                f"points: {point} users", hint="whole numbers where users are counted"
            )
        return f"trace.users={int(point)}"
    key = "time_scale" if base.trace.kind == "file" else "rate"
    return f"trace.{key}={yaml_float(point)}"


def _read(path: Path) -> dict[str, Any]:
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds no scenario", hint="KEY: VALUE lines, as in deploy/simulation/scenarios"
        )
    return tree


def _set(tree: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{setting!r} is no setting", hint="section.key=value")
    value = parse_yaml(text, f"{key}: {text!r}")
    *sections, name = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{key}: {section} is no section here",
                hint=f"{section} stands in for one: set {section} to a section of its own",
            )
        tree = inner
    tree[name] = value


def with_presets(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with names in place of sections looked up."""
    verifier, acceptance = tree.get("verifier"), tree.get("acceptance")
    if isinstance(verifier, dict) and isinstance(name := verifier.get("curve"), str):
        if name.endswith(".json"):
            curve = profiled_curve(Path(name))
        elif name in CURVES:
            curve = CURVES[name]
        else:
            raise ConfigError(
                f"verifier.curve: no curve {name!r}",
                hint=f"a section, a JSON file, or one of {', '.join(CURVES)}",
            )
        tree = tree | {"verifier": verifier | {"curve": _plain(curve)}}
    if isinstance(acceptance, dict) and isinstance(name := acceptance.get("domains"), str):
        domains = _domains(name, acceptance.get("regime", "coupled"))
        plain = [_plain(domain) for domain in domains]
        tree = tree | {"acceptance": acceptance | {"domains": plain}}
    return tree


def _domains(name: str, regime: str) -> tuple[Domain, ...]:
    if name.endswith(".json"):
        temperature = 0.0 if regime == "greedy" else 1.0
        return evaluated_domains(Path(name), temperature=temperature, mode=regime)
    if name not in DOMAINS:
        raise ConfigError(
            f"acceptance.domains: no domains {name!r}",
            hint=f"a list of sections, a JSON file, or one of {', '.join(DOMAINS)}",
        )
    return DOMAINS[name]()


def _plain(section: Any) -> dict[str, Any]:
    """A section as YAML would hold it."""
    return {f.name: _listed(getattr(section, f.name)) for f in dataclasses.fields(section)}


def _listed(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) if dataclasses.is_dataclass(one) else one for one in value]
    return value
