"""Which drafts survive, and what their drafter says of that. Pure; every number has a name.

The probability that draft k behind an anchor survives if all before it do is

    p = sigmoid(m[domain, k] + request_sd * z_1 + drift_sd * z_2 + position_sd * z_3)

with standard normals z_1 of the request, z_2 of a stretch of its text and z_3 of the position. The
intercepts m are solved for so that the conditional acceptance by position, counted over rounds that
verify everything (as the paper's Figure 2 and `dspark eval` count it), is the domain's table:
behind k survivors only easier requests and places are left, which m has to make up for.

Confidence is p through ``logit -> slope * logit + offset``: calibrated at (1, 0).

Shape legend: S sessions, G gamma, D domains, Z nodes of a quadrature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigError
from cluster.json_text import misshape, read_json
from cluster.sections import one_of, positive
from deploy.simulation.curves import seconds
from deploy.simulation.keyed import U64, normals, uniforms

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_DOMAIN, _REQUEST, _SEGMENT, _PLACE, _FATE = 1, 2, 3, 4, 5
"""Purposes of keyed numbers; `deploy.simulation.text` goes on from 16."""
_THIS_AND_NEXT: Final = np.array([[0], [1]], np.uint64)
_NODES: Final = 24
_LIMIT: Final = 12.0
"""Intercepts stay inside: 1 - 1e-5 is certain enough."""
_EPS: Final = 1e-5
_HINT: Final = "write one with dspark eval --json"


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Texts that are drafted equally well."""

    name: str = "all"
    weight: float = positive(1.0)
    """Share of requests, up to a common factor."""
    acceptance: tuple[float, ...] = (0.8, 0.8, 0.8, 0.8, 0.8)
    """By position 1..gamma: share of drafts accepted, of those reached."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceModel:
    """A drafter and its texts."""

    regime: str = one_of("coupled", "greedy", "rejection")
    """How requests are sampled, hence which budget policies may look at what."""
    domains: tuple[Domain, ...] = (Domain(),)
    request_sd: float = seconds(0.4)
    """Logits between requests of one domain."""
    drift_sd: float = seconds(0.3)
    """Logits between stretches of one request ..."""
    drift_tokens: int = positive(64)
    """... of so many tokens, with straight transitions."""
    position_sd: float = seconds(1.0)
    """Logits between positions: what a confidence head has to see."""
    confidence_slope: float = positive(1.0)
    confidence_offset: float = 0.0

    def __post_init__(self) -> None:
        if not self.domains:
            raise ConfigError("an acceptance model without domains")
        if len({len(domain.acceptance) for domain in self.domains}) != 1 or not self.gamma:
            raise ConfigError(
                "acceptance: domains of different block lengths, or of length 0",
                hint="every domain lists its acceptance for positions 1 to gamma",
            )
        if not all(0 < p < 1 for domain in self.domains for p in domain.acceptance):
            raise ConfigError("acceptance: shares must be over 0 and under 1")

    @property
    def gamma(self) -> int:
        """Drafts of a block."""
        return len(self.domains[0].acceptance)

    @property
    def temperature(self) -> float:
        """Of the requests."""
        return 0.0 if self.regime == "greedy" else 1.0

    @property
    def mode(self) -> str:
        """Of the requests, as `cluster.wire.Sampling` has it."""
        return "rejection" if self.regime == "rejection" else "coupled"

    def accepted_length(self) -> F64:
        """tau of whole blocks, bonus included, by domain [D]: mean over rounds."""
        tables = np.array([domain.acceptance for domain in self.domains])
        tau: F64 = 1.0 + tables.cumprod(axis=1).sum(axis=1)
        return tau

    def domain_of(self, key_S: U64) -> I64:
        """Index of each request's domain [S]."""
        drawn = uniforms(key_S, np.uint64(0), _DOMAIN)
        return np.searchsorted(self._shares, drawn, side="right").clip(0, len(self.domains) - 1)

    def traits(self, key_S: U64) -> F64:
        """What does not change about a request: its intercepts [S, G], its own share included."""
        own_S = self.request_sd * normals(key_S, np.uint64(0), _REQUEST)
        traits: F64 = self._intercepts[self.domain_of(key_S)] + own_S[:, None]
        return traits

    def logits(self, key_S: U64, anchor_S: I64, traits_SG: F64) -> F64:
        """True logits [S, G] of blocks behind these anchors."""
        logit_SG = traits_SG
        if self.drift_sd:
            at = anchor_S / self.drift_tokens
            first = np.floor(at)
            f, index = at - first, first.astype(np.uint64)
            before, after = normals(key_S, index + _THIS_AND_NEXT, _SEGMENT)
            # Of unit variance all the way.
            drift_S = ((1 - f) * before + f * after) / np.sqrt((1 - f) ** 2 + f**2)
            logit_SG = logit_SG + self.drift_sd * drift_S[:, None]
        if self.position_sd:
            place_SG = normals(key_S[:, None], self._places(anchor_S), _PLACE)
            logit_SG = logit_SG + self.position_sd * place_SG
        return logit_SG

    def draft(self, key_S: U64, anchor_S: I64, traits_SG: F64) -> tuple[NDArray[np.bool_], F64]:
        """Blocks behind these anchors: which drafts are what the target will say, each by itself
        [S, G], and the confidence in each [S, G]."""
        logit_SG = self.logits(key_S, anchor_S, traits_SG)
        fate_SG = uniforms(key_S[:, None], self._places(anchor_S), _FATE)
        right_SG = fate_SG < _sigmoid(logit_SG)
        return right_SG, self.confidence(logit_SG)

    def confidence(self, logit_SG: F64) -> F64:
        """What the drafter states for drafts of these true logits."""
        if self.confidence_slope == 1.0 and self.confidence_offset == 0.0:
            return _sigmoid(logit_SG)
        return _sigmoid(self.confidence_slope * logit_SG + self.confidence_offset)

    def _places(self, anchor_S: I64) -> U64:
        places: U64 = (anchor_S[:, None] + np.arange(1, self.gamma + 1)).astype(np.uint64)
        return places

    @cached_property
    def _shares(self) -> F64:
        weights = np.array([domain.weight for domain in self.domains])
        shares: F64 = weights.cumsum() / weights.sum()
        return shares

    @cached_property
    def _intercepts(self) -> F64:
        """[D, G]"""
        shared_sd = float(np.hypot(self.request_sd, self.drift_sd))
        return np.array(
            [_intercepts(d.acceptance, shared_sd, self.position_sd) for d in self.domains]
        )


def evaluated_domains(
    path: Path, *, temperature: float, mode: str, drafter: str = ""
) -> tuple[Domain, ...]:
    """Domains as ``dspark eval`` measured them.

    Args:
        drafter: name in the report; empty: its first one.
        mode: ``coupled`` or ``rejection``, ignored at temperature 0.

    Raises:
        ConfigError: unreadable, no report, or nothing in it for that regime.
    """
    report: Any = read_json(path, _HINT)
    try:
        found = report["positions"]
        wanted = "greedy" if temperature == 0 else mode
        name = drafter or found[0]["drafter"]
        table: dict[str, list[float]] = {}
        for row in found:
            if (row["drafter"], row["temperature"], row["mode"]) == (name, temperature, wanted):
                table.setdefault(row["domain"], []).append(float(row["acceptance"]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} is no report of dspark eval: {misshape(error)}", hint=_HINT
        ) from error
    table.pop("all", None)
    if not table:
        raise ConfigError(
            f"{path} has no acceptance of {name!r} at temperature {temperature}, {wanted}",
            hint="measure it with dspark eval --temperature",
        )
    gamma = min(map(len, table.values()))
    return tuple(
        Domain(name=key, acceptance=tuple(min(max(p, _EPS), 1 - _EPS) for p in values[:gamma]))
        for key, values in table.items()
    )


@lru_cache(maxsize=256)
def _intercepts(table: tuple[float, ...], shared_sd: float, position_sd: float) -> F64:
    """Intercepts [G] that give this conditional acceptance over rounds.

    A request that accepts less has more rounds, so the weight of a trait is that of its requests
    over its accepted length: a fixed point, reached in a few turns.
    """
    node_Z, weight_Z = _normal_nodes()
    place_Z, place_weight_Z = _normal_nodes()
    at_ZZ = shared_sd * node_Z[:, None] + position_sd * place_Z
    share_Z = weight_Z
    intercept_G = np.zeros(len(table))
    for _ in range(8):
        reached_Z, tau_Z = np.ones(_NODES), np.ones(_NODES)
        for k, wanted in enumerate(table):
            low, high = -_LIMIT, _LIMIT
            for _ in range(48):
                middle = (low + high) / 2
                passed_Z = _sigmoid(middle + at_ZZ) @ place_weight_Z
                reach = share_Z * reached_Z
                if (reach * passed_Z).sum() < wanted * reach.sum():
                    low = middle
                else:
                    high = middle
            intercept_G[k] = middle
            reached_Z = reached_Z * passed_Z
            tau_Z = tau_Z + reached_Z
        share_Z = weight_Z / tau_Z
    return intercept_G


def _normal_nodes() -> tuple[F64, F64]:
    """Nodes and weights of an expectation under the standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    return nodes, weights / weights.sum()


def _sigmoid(logit: F64) -> F64:
    probability: F64 = 1 / (1 + np.exp(-logit))
    return probability
