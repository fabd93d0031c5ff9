"""Ways to deploy a pair: where drafts come from, and on which kind of devices.

Three ways: drafters on devices of their own, drafters on the verifiers' devices, no drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from deploy.simulation.plan import PlanSpec, Traffic
from deploy.simulation.prices import DeviceSpec, draft_curve, kv_tokens, step_curve
from deploy.simulation.rates_days import Deployment, PoolSize
from deploy.simulation.rates_pair import PairSpec
from deploy.simulation.specs import DrafterSpec, VerifierSpec

DISAGGREGATED: Final = "disaggregated"
COLOCATED: Final = "colocated"
PLAIN: Final = "no drafts"
WAYS: Final = (DISAGGREGATED, COLOCATED, PLAIN)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way on a kind of devices, with the pair that it makes."""

    way: str
    verifier: DeviceSpec
    drafter: DeviceSpec | None
    deployment: Deployment | None
    """None: the models do not fit; ``reason`` says why."""
    reason: str
    sessions_per_drafter: float
    """Requests whose draft keys and values one drafter has room for."""

    def dollars(self, size: PoolSize) -> float:
        """Per hour."""
        of_drafters = self.drafter.dollars_per_hour if self.drafter else 0.0
        return size.verifiers * self.verifier.verifier_dollars + size.drafters * of_drafters


def kinds_of(plan: PlanSpec, traffic: Traffic) -> list[Kind]:
    """Every way on every kind of devices.

    Raises:
        ConfigError: a profile that cannot be read.
    """
    kinds = []
    for verifier in plan.devices:
        if not verifier.verifies:
            continue
        for drafter in plan.devices:
            if drafter.drafts:
                kinds.append(_kind(plan, traffic, DISAGGREGATED, verifier, drafter))
        kinds.append(_kind(plan, traffic, COLOCATED, verifier, None))
        kinds.append(_kind(plan, traffic, PLAIN, verifier, None))
    return kinds


def _kind(
    plan: PlanSpec, traffic: Traffic, way: str, verifier: DeviceSpec, drafter: DeviceSpec | None
) -> Kind:
    beside = plan.drafter if way == COLOCATED else None
    room = kv_tokens(verifier, plan.target, plan.kernels, beside=beside)
    lengths = traffic.lengths
    longest = lengths.prompt.mean + lengths.output.mean
    reason, sessions = "", math.inf
    if room < longest:
        reason = (
            f"memory: {verifier.per_verifier} x {verifier.name} hold the weights and "
            f"{max(room, 0)} positions of context, a request has {longest:.0f}"
        )
    if drafter is not None:
        own = kv_tokens(replace(drafter, per_verifier=1), plan.drafter, plan.kernels, beside=None)
        sessions = own / lengths.mean_context
        if sessions < 1:
            reason = reason or f"memory: {drafter.name} does not hold the drafter and a session"
    return Kind(
        way=way,
        verifier=verifier,
        drafter=drafter,
        deployment=None if reason else _deployment(plan, traffic, way, verifier, drafter, room),
        reason=reason,
        sessions_per_drafter=sessions,
    )


def _deployment(
    plan: PlanSpec,
    traffic: Traffic,
    way: str,
    verifier: DeviceSpec,
    drafter: DeviceSpec | None,
    room: int,
) -> Deployment:
    lengths = traffic.lengths
    curve = draft_curve(
        drafter or verifier,
        plan.drafter,
        plan.kernels,
        gamma=plan.acceptance.gamma,
        context=lengths.mean_context,
    )
    scheduling = replace(plan.scheduling, policy="none") if way == PLAIN else plan.scheduling
    pair = PairSpec(
        verifier=VerifierSpec(
            curve=step_curve(verifier, plan.target, plan.kernels),
            max_requests=plan.limits.max_requests,
            kv_tokens=room,
        ),
        drafter=DrafterSpec(curve=curve, shares_verifier=way == COLOCATED),
        link=plan.links,
        acceptance=plan.acceptance,
        lengths=lengths,
        scheduling=scheduling,
        prefill_budget=plan.limits.prefill_budget,
    )
    return Deployment(pair, target=plan.slo.target)
