"""The configuration tree: frozen, keyword only, one section per component, parsed once.

`load_config` reads YAML (or takes a mapping) by the rules of `cluster.sections`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cluster.adapter_name import check_adapter_key
from cluster.application_name import check_application
from cluster.errors import ConfigError
from cluster.policy_text import read_policy
from cluster.sections import natural, one_of, parse_section, positive
from cluster.token import check_token
from cluster.yaml_text import read_yaml

MAX_THREADS: Final = 1024
"""Of one process; far more end it with a fault inside OpenMP."""

_DTYPES: Final = ("float32", "bfloat16", "float16")


def _check_folder(path: str) -> None:
    if not path.strip():
        raise ConfigError("no folder", hint="NAME: FOLDER")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The target model."""

    target: str = "smollm2-135m"
    """A name of the model store, a local Hugging Face folder, or a hub id."""
    dtype: str = one_of("auto", *_DTYPES)
    """``auto``: fp32 on a CPU, else the checkpoint's own."""
    device: str = "auto"
    """``auto`` (CUDA where there is one), ``cpu``, ``cuda``, ``cuda:N``."""
    max_model_len: int = positive(2048)
    """Most positions of one request, prompt included."""


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    """Prompt lookup, the drafter without weights (``drafter.checkpoint: ngram``)."""

    gamma: int = positive(8, most=64)
    """Most tokens drafted per block."""
    max_ngram: int = positive(8, most=64)
    """A longer match is not looked for."""
    min_ngram: int = positive(2, most=64)
    """Shortest match that counts."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The drafter pool."""

    checkpoint: str = "default"
    """``default`` (shipped for the embedded target), a folder, a hub id, ``ngram`` (prompt lookup,
    for any target), or ``none``."""
    lookup: LookupConfig = field(default_factory=LookupConfig)
    num_replicas: int = natural(1)
    num_cpus: float = positive(0.5)
    num_gpus: float = natural(0)
    dtype: str = one_of("auto", *_DTYPES)
    """``auto``: fp32 on a CPU, else bfloat16."""
    num_threads: int = natural(0, most=MAX_THREADS)
    """Torch threads of a replica, 0 for all cores."""
    max_sessions: int = positive(256)
    max_session_tokens: int = positive(1 << 20)
    """Draft KV over all sessions, in positions."""
    idle_session_s: float = positive(120.0)
    max_pending_bytes: int = natural(32 << 20)
    """Features kept uncomputed for requests that no draft is asked for; past it the oldest are
    computed. 0: every one at once."""
    q_top_k: int = positive(64, most=1024)
    """Width of the sparse q in rejection mode."""
    batch_window_s: float = field(default=0.0, metadata={"least": 0, "most": 1.0})
    """How long a draft batch waits for more commits once it could start."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """What only the vLLM engine knows."""

    tensor_parallel: int = positive(1)
    """GPUs of a replica; each holds a part of every layer."""
    pipeline_parallel: int = positive(1)
    """1: features are tapped on one rank."""
    executor: str = one_of("mp", "ray")
    """With several GPUs: processes on one node, or Ray workers in the replica's placement group."""
    kv_overcommit: float = field(default=1.0, metadata={"least": 1.0, "most": 16.0})
    """KV promised to requests over KV that there is. Over 1, requests that are likely to end early
    share it; when it runs out after all, one is computed again later."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, by its own names (``quantization``, ``kv_cache_dtype``,
    ``gpu_memory_utilization``, ...)."""


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """The verifier pool."""

    engine: str = one_of("torch", "vllm")
    vllm: VllmConfig = field(default_factory=VllmConfig)
    num_replicas: int = positive(1)
    num_cpus: float = positive(1.0)
    num_gpus: float = natural(0)
    num_threads: int = natural(0, most=MAX_THREADS)
    max_requests: int = positive(64)
    max_step_tokens: int = positive(512)
    """Most tokens of one step, verify rows and prompt chunks together."""
    kv_tokens: int = natural(32768)
    """Target KV, in positions over all requests. 0, for ``vllm`` only: what its memory holds."""
    kv_block_tokens: int = positive(16)
    feature_cache_bytes: int = natural(256 << 20)
    """Projected rows kept for live sessions, so that they can move to another drafter."""
    prefix_cache: bool = True
    """Prompts whose beginning was computed before, for this or another request, start behind it."""
    prefix_rows_bytes: int = natural(256 << 20)
    """Projected rows kept for the prefix cache: where they are missing a prompt is computed anew,
    because a drafter needs them."""
    link_queue_bytes: int = positive(128 << 20)
    """Most bytes queued towards one drafter before its sessions are unbound."""
    lease_ttl_s: float = positive(10.0)
    profile_budget_s: float = positive(20.0)
    """Most time that measuring the step profile may take at start."""
    adapters: Mapping[str, str] = field(
        default_factory=dict, metadata={"read_key": check_adapter_key, "read": _check_folder}
    )
    """LoRA adapters of the target: the name that requests give, and the folder (``vllm`` only)."""


@dataclass(frozen=True, kw_only=True)
class SchedulingConfig:
    """What a lane decides, and how. Can be changed while it serves; each part can be turned off."""

    policy: str = field(default="adaptive", metadata={"read": read_policy})
    """How many drafts of each block are verified, see `cluster.policy_text`: ``adaptive``,
    ``causal``, ``lagged``, ``retrospective``, ``fixed:K``, ``threshold:C``, ``full`` or ``none``.
    """
    min_gain: float = field(default=0.02, metadata={"least": 0, "most": 1.0})
    """Least predicted gain in tokens/s, as a share, for which blocks are cut at all."""
    gather: str = one_of("steady", "when_free", "wait_for_all")
    """When the verifier falls idle: compare going now with waiting and two groups with one; or go
    with what is ready; or wait for all drafts that are due."""
    late_dispatch: bool = True
    """Hand a step over just before the running one is predicted to end, not when it has ended."""
    prefill_stretch: float = positive(1.0)
    """Prompt chunks make the step that carries them at most this share longer, as predicted, or by
    the requests that wait for their prompts over those that decode if that is more; and an eighth
    of ``router.prefill_budget`` always goes."""
    gate_drafts: bool = True
    """Ask for a draft only where it is expected to pay."""
    draft_price: float = field(default=0.0, metadata={"least": 0, "most": 1e6})
    """What a second of a drafter device costs, in seconds of a verifier device. Drafting on the
    verifier's own device is charged its measured time besides."""
    live_profile: bool = True
    """Learn step times from the steps that run; false: keep the table measured at start."""
    context_term: bool = True
    """Let predicted step times depend on the context length."""
    recalibrate: bool = True
    """Correct the drafter's confidences by what becomes of its drafts here."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Ingress, admission and lanes."""

    num_replicas: int = positive(1)
    num_cpus: float = positive(0.5)
    max_queued_requests: int = positive(256)
    max_queued_tokens: int = positive(1 << 18)
    """Prompt plus new tokens of all requests waiting for a lane."""
    default_max_tokens: int = positive(256)
    prefill_budget: int = positive(256)
    """Prompt tokens per step beside the verify rows."""
    draft_timeout_s: float = positive(2.0)
    """Hard bound on waiting for a block; the usual wait is learnt from the link."""
    step_timeout_s: float = positive(60.0)
    """A verifier that does not answer a step for this long is taken for dead."""
    unplaced_timeout_s: float = positive(30.0)
    """After so long without any verifier in the cluster, waiting requests end with Unavailable."""
    default_mode: str = one_of("coupled", "rejection")
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    explore_fraction: float = field(default=1 / 64, metadata={"least": 0, "most": 1.0})
    """Share of row-rounds whose block is verified whole, whatever the schedule says, so that the
    worth of long drafts stays known where load or low confidence has them cut."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What holds the pools together."""

    application: str = field(default="dspark", metadata={"read": check_application})
    """Of Ray Serve; letters, digits, dots, dashes and underscores."""
    grpc_port: int = positive(9000, most=65535)
    proxy: str = one_of("python", "haproxy")
    """Of a Ray that we start: which of Serve's two stands between clients and routers. HAProxy, on
    Linux only, costs 0.16 cores less at 190 tokens/s. It takes a router that has no time to answer
    its checks for dead, and may cut calls off when applications come and go. A running Ray has its
    own, by RAY_SERVE_ENABLE_HA_PROXY where its nodes were started."""
    data_host: str = ""
    """Interface that data-plane servers bind and advertise; empty: the node's own address under
    Ray, 127.0.0.1 elsewhere."""
    heartbeat_s: float = positive(1.0)
    member_ttl_s: float = positive(5.0)
    connect_timeout_s: float = positive(5.0)
    auth_token: str = field(default="", metadata={"read": check_token})
    """Shared secret of data plane and clients; usually from DSPARK_TOKEN, not from a file."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Root of the tree."""

    model: ModelConfig = field(default_factory=ModelConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def load_config(source: Path | Mapping[str, Any] | None) -> Config:
    """Parse a YAML file or a mapping; None gives the defaults.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, value out of range.
    """
    if source is None:
        return Config()
    if isinstance(source, Path):
        loaded = read_yaml(source)
        source = {} if loaded is None else loaded
    return fitting(parse_section(Config, source, ""))


def fitting(config: Config) -> Config:
    """The configuration, if its values go together.

    Raises:
        ConfigError: they do not; names both.
    """
    cluster, verifier = config.cluster, config.verifier
    if cluster.member_ttl_s <= cluster.heartbeat_s:
        raise ConfigError(
            f"cluster.member_ttl_s: {cluster.member_ttl_s} must be over "
            f"cluster.heartbeat_s, {cluster.heartbeat_s}",
            hint="a member is forgotten if it does not speak up in time",
        )
    parallel = verifier.vllm.tensor_parallel
    if parallel > 1 and verifier.num_gpus not in (0, parallel):
        raise ConfigError(
            f"verifier.num_gpus: {verifier.num_gpus:g} for "
            f"verifier.vllm.tensor_parallel = {parallel}",
            hint="it counts the GPUs of a whole replica",
        )
    lookup = config.drafter.lookup
    if lookup.min_ngram > lookup.max_ngram:
        raise ConfigError(
            f"drafter.lookup.min_ngram: {lookup.min_ngram} is over "
            f"drafter.lookup.max_ngram, {lookup.max_ngram}"
        )
    if verifier.kv_tokens == 0:
        if verifier.engine != "vllm":
            raise ConfigError(
                "verifier.kv_tokens: 0 (what memory holds) is for verifier.engine: vllm",
                hint="say how many positions the torch engine shall hold",
            )
    elif verifier.kv_tokens < verifier.kv_block_tokens:
        raise ConfigError(
            f"verifier.kv_tokens: {verifier.kv_tokens} is less than one block, "
            f"verifier.kv_block_tokens = {verifier.kv_block_tokens}"
        )
    return config
