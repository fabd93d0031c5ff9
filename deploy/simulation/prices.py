"""Devices with their prices, and what steps and draft batches take on them. Pure arithmetic.

A step curve is measured (``dspark profile --json``) or follows from a data sheet by the roofline:
the weights are read once, arithmetic hides behind that until it takes longer, keys and values are
read per position of context. Data sheets state peaks; `KernelSpec` says what share of them is
reached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from cluster.errors import ConfigError
from cluster.sections import natural, positive
from deploy.simulation.curves import DraftCurve, StepCurve, profiled_curve, seconds
from deploy.simulation.specs import share

_GIGA: Final = 1e9


class Datasheet(NamedTuple):
    """What a maker states of a device."""

    memory_gb: float
    bandwidth_gb_s: float
    tflops: float
    """Dense, 16 bits."""
    source: str


DATASHEETS: Final = {
    "a10": Datasheet(24, 600, 125, "NVIDIA A10 data sheet"),
    "a100-80gb": Datasheet(80, 2039, 312, "NVIDIA A100 80GB SXM data sheet"),
    "h100-sxm": Datasheet(80, 3350, 989, "NVIDIA H100 SXM data sheet, without sparsity"),
    "h200": Datasheet(141, 4800, 989, "NVIDIA H200 SXM data sheet, without sparsity"),
    "l4": Datasheet(24, 300, 121, "NVIDIA L4 data sheet, without sparsity"),
    "l40s": Datasheet(48, 864, 362, "NVIDIA L40S data sheet, without sparsity"),
}
"""By the name that `DeviceSpec.datasheet` takes."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A kind of device that can be rented."""

    name: str = ""
    dollars_per_hour: float = field(default=-1.0, metadata={"least": 0, "most": 1e6})
    """Of one device."""
    datasheet: str = ""
    """A name of `DATASHEETS`; the next three override it."""
    memory_gb: float = natural(0)
    bandwidth_gb_s: float = natural(0)
    tflops: float = natural(0)
    per_verifier: int = positive(1, most=64)
    """Devices that make up one verifier (tensor parallel)."""
    profile: str = ""
    """Of one verifier on this kind: a file of ``dspark profile --json``, in place of the
    roofline."""
    draft_fixed_s: float = seconds()
    """Measured draft batches, in place of the roofline: without any block ..."""
    draft_per_block_s: float = seconds()
    """... and for each of them."""
    verifies: bool = True
    drafts: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a device without a name")
        where = f"devices: {self.name}"
        if self.dollars_per_hour < 0:
            raise ConfigError(f"{where}: dollars_per_hour is missing")
        if self.datasheet and self.datasheet not in DATASHEETS:
            raise ConfigError(
                f"{where}: no data sheet {self.datasheet!r}",
                hint=f"known: {', '.join(DATASHEETS)}; or give memory_gb, bandwidth_gb_s, tflops",
            )
        sheet = self.sheet
        if min(sheet.memory_gb, sheet.bandwidth_gb_s, sheet.tflops) <= 0:
            raise ConfigError(
                f"{where}: memory_gb, bandwidth_gb_s and tflops must be over 0",
                hint=f"or name a datasheet: {', '.join(DATASHEETS)}",
            )

    @property
    def sheet(self) -> Datasheet:
        """The data sheet, with what overrides it."""
        known = DATASHEETS.get(self.datasheet, Datasheet(0, 0, 0, "the plan file"))
        changed = any((self.memory_gb, self.bandwidth_gb_s, self.tflops))
        return Datasheet(
            memory_gb=self.memory_gb or known.memory_gb,
            bandwidth_gb_s=self.bandwidth_gb_s or known.bandwidth_gb_s,
            tflops=self.tflops or known.tflops,
            source=f"{known.source}, changed by the plan file" if changed else known.source,
        )

    @property
    def source(self) -> str:
        """Where its step times come from."""
        return f"measured: {self.profile}" if self.profile else f"roofline of {self.sheet.source}"

    @property
    def verifier_dollars(self) -> float:
        """Per hour, of one verifier."""
        return self.dollars_per_hour * self.per_verifier


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What a model weighs. Of the drafter: all that a block needs, its share of the head too."""

    weights_gb: float = positive(16.0)
    """All of them, as they lie in memory."""
    active_b: float = positive(8.0)
    """Parameters that a token meets, in billions: two operations each."""
    kv_bytes_per_token: float = positive(131072.0)


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Shares of a data sheet's peaks that kernels reach, and time that is neither. Assumptions of
    ours where no profile is given, not measurements."""

    bandwidth: float = share(0.8)
    arithmetic: float = share(0.5)
    parallel: float = share(0.9)
    """Speed-up of each device after the first of one verifier."""
    step_overhead_s: float = seconds(0.0015)
    draft_overhead_s: float = seconds(0.0015)
    """Launches, sampling, the sequential head."""
    usable_memory: float = share(0.9)

    def __post_init__(self) -> None:
        if not self.bandwidth or not self.arithmetic or not self.usable_memory:
            raise ConfigError("kernels: bandwidth, arithmetic and usable_memory must be over 0")


def step_curve(device: DeviceSpec, target: ModelSize, kernels: KernelSpec) -> StepCurve:
    """Seconds of one verify step of the target.

    Raises:
        ConfigError: a profile that cannot be read.
    """
    if device.profile:
        return profiled_curve(Path(device.profile))
    sheet = device.sheet
    speed_up = 1 + (device.per_verifier - 1) * kernels.parallel
    bytes_per_s = sheet.bandwidth_gb_s * _GIGA * kernels.bandwidth * speed_up
    flop_per_s = sheet.tflops * 1e12 * kernels.arithmetic * speed_up
    return StepCurve(
        fixed_s=kernels.step_overhead_s,
        memory_s=target.weights_gb * _GIGA / bytes_per_s,
        per_token_s=2 * target.active_b * _GIGA / flop_per_s,
        per_context_s=target.kv_bytes_per_token / bytes_per_s,
        tile_tokens=8,
    )


def draft_curve(
    device: DeviceSpec, drafter: ModelSize, kernels: KernelSpec, *, gamma: int, context: float
) -> DraftCurve:
    """Seconds of one draft batch on one device.

    Args:
        context: positions behind a block, on average.
    """
    if device.draft_fixed_s:
        return DraftCurve(
            fixed_s=device.draft_fixed_s, per_block_s=device.draft_per_block_s, per_row_s=0.0
        )
    sheet = device.sheet
    bytes_per_s = sheet.bandwidth_gb_s * _GIGA * kernels.bandwidth
    flop_per_s = sheet.tflops * 1e12 * kernels.arithmetic
    token_s = 2 * drafter.active_b * _GIGA / flop_per_s
    return DraftCurve(
        fixed_s=kernels.draft_overhead_s + drafter.weights_gb * _GIGA / bytes_per_s,
        per_block_s=gamma * token_s + context * drafter.kv_bytes_per_token / bytes_per_s,
        per_row_s=token_s,
    )


def kv_tokens(
    device: DeviceSpec, target: ModelSize, kernels: KernelSpec, *, beside: ModelSize | None
) -> int:
    """Positions that one verifier has room for; under 1 if the weights alone do not fit.

    Args:
        beside: a drafter in the same memory, with keys and values of its own.
    """
    room = device.sheet.memory_gb * _GIGA * device.per_verifier * kernels.usable_memory
    room -= target.weights_gb * _GIGA
    per_token = target.kv_bytes_per_token
    if beside is not None:
        room -= beside.weights_gb * _GIGA
        per_token += beside.kv_bytes_per_token
    return int(room / per_token)
