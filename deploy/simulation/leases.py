"""The lease that a simulated verifier grants: its limits, and the table it measured at start."""

from __future__ import annotations

from itertools import chain

import numpy as np

from cluster.wire import Lease
from deploy.simulation.curves import StepCurve
from deploy.simulation.specs import VerifierSpec
from deploy.simulation.text import VOCAB_SIZE
from deploy.simulation.verifier import KV_BLOCK_TOKENS
from router.step_load import StepLoad


def lease_of(spec: VerifierSpec, lane_epoch: int) -> Lease:
    """What the verifier grants."""
    sizes = profile_sizes(spec.curve, spec.max_step_tokens)
    loads = [StepLoad(num_rows=0, num_tokens=size) for size in sizes]
    table = np.array([spec.curve.step_s(load) for load in loads])
    curve, factor = spec.curve, spec.profile_factor
    return Lease(
        lane_epoch=lane_epoch,
        ttl_s=10.0,
        max_model_len=spec.max_model_len,
        vocab_size=VOCAB_SIZE,
        max_requests=spec.max_requests,
        max_step_tokens=spec.max_step_tokens,
        kv_block_tokens=KV_BLOCK_TOKENS,
        kv_blocks=spec.kv_tokens // KV_BLOCK_TOKENS,
        profile_tokens=np.array(sizes, np.int32),
        profile_step_s=(table * factor).astype(np.float32),
        profile_row_s=curve.per_row_s * factor,
        profile_context_s=curve.per_context_s * factor,
        profile_pair_s=curve.per_pair_s * factor,
        profile_prefill_s=curve.per_prefill_s * factor,
        profile_noise=spec.jitter,
        profile_fingerprint="simulated",
    )


def profile_sizes(curve: StepCurve, most: int) -> list[int]:
    """Sizes B worth measuring: powers of two with a step between, and both sides of every cliff,
    as far as tiles tell them apart."""
    grid = chain.from_iterable((2**n, 3 * 2 ** (n - 1)) for n in range(1, most.bit_length() + 1))
    edges = chain.from_iterable((cliff.above, cliff.above + 1) for cliff in curve.cliffs)
    wanted = {1, most, *grid, *edges, *curve.table_tokens}
    tiled = {curve.padded(size) for size in wanted if 1 <= size <= most}
    return sorted(size for size in tiled if size <= most) or [most]
