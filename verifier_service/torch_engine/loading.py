"""From a Hugging Face folder to a `TargetModel` and its engine, reading safetensors directly.

Every tensor of the checkpoint must have a place, and every place a tensor: what nobody read is how
a checkpoint is served wrong in silence.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cluster.config import ModelConfig, VerifierConfig
from cluster.errors import CheckpointError, ConfigError, Unsupported
from cluster.fingerprint import folder_fingerprint
from cluster.linear import PackedLinear
from cluster.tensor_folder import TensorFolder
from verifier_service.engine import EngineLimits
from verifier_service.projection import load_feature_projection
from verifier_service.torch_engine.engine import TorchEngine
from verifier_service.torch_engine.model import Layer, TargetModel
from verifier_service.torch_engine.spec import TargetSpec, read_spec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_engine(
    target: Path, *, model: ModelConfig, verifier: VerifierConfig, drafter: Path | None = None
) -> TorchEngine:
    """Build the engine of a verifier replica. ``model.target`` has been resolved to ``target``.

    ``model.max_model_len`` is capped by the checkpoint's own maximum (`EngineLimits` says the
    result). ``verifier.num_threads`` sets torch's threads of this process.

    Args:
        drafter: checkpoint folder whose projection is applied; None ships no features.

    Raises:
        ModelNotFound, CheckpointError, Unsupported, ConfigError: see `load_target`; also a drafter
            that does not fit the target, and any LoRA adapter.
    """
    if verifier.adapters:
        raise Unsupported(
            f"verifier.adapters: {len(verifier.adapters)} for the torch engine, which takes none",
            hint="verifier.engine: vllm",
        )
    if verifier.num_threads:
        torch.set_num_threads(verifier.num_threads)
    device = resolve_device(model.device)
    loaded = load_target(target, device=device, dtype=model.dtype)
    projection = None
    if drafter is not None:
        projection = load_feature_projection(drafter, target, device=device, dtype=loaded.dtype)
    return TorchEngine(
        loaded,
        engine_limits(loaded, target, model, verifier),
        projection,
        prefix_cache=verifier.prefix_cache,
        prefix_rows_bytes=verifier.prefix_rows_bytes,
    )


def engine_limits(
    loaded: TargetModel, target: Path, model: ModelConfig, verifier: VerifierConfig
) -> EngineLimits:
    """What an engine over ``loaded``, read from the folder ``target``, may hold."""
    return EngineLimits(
        model_fingerprint=folder_fingerprint(target),
        vocab_size=loaded.spec.vocab_size,
        max_model_len=min(model.max_model_len, loaded.spec.max_position_embeddings),
        max_requests=verifier.max_requests,
        max_step_tokens=verifier.max_step_tokens,
        kv_block_tokens=verifier.kv_block_tokens,
        kv_blocks=verifier.kv_tokens // verifier.kv_block_tokens,
        platform=_platform(loaded.device, loaded.dtype),
    )


def _platform(device: torch.device, dtype: torch.dtype) -> str:
    """What makes one replica's steps faster than another's, the machine's load apart."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{device.type} {platform.machine()} {torch.get_num_threads()} threads"
    return f"torch {torch.__version__} {where} {str(dtype).removeprefix('torch.')}"


def load_target(folder: Path, *, device: torch.device, dtype: str = "auto") -> TargetModel:
    """Load weights to ``device``.

    Args:
        dtype: ``auto`` is fp32 on a CPU and the checkpoint's own elsewhere.

    Raises:
        ModelNotFound, CheckpointError, Unsupported: see `read_spec`; also a tensor that is missing,
            misshapen, or has no place in the architecture.
        ConfigError: an unknown dtype.
    """
    spec = read_spec(folder)
    weights = _Weights(folder, device=device, dtype=resolve_dtype(dtype, device, spec.dtype))
    vocabulary = (spec.vocab_size, spec.hidden_size)
    embedding = weights.take("model.embed_tokens.weight", vocabulary)
    if spec.tied_head:
        weights.ignore("lm_head.weight")
        head = _linear(embedding)
    else:
        head = _linear(weights.take("lm_head.weight", vocabulary))
    layers = [_read_layer(spec, weights, index) for index in range(spec.num_layers)]
    norm = weights.take("model.norm.weight", (spec.hidden_size,))
    weights.finish()
    return TargetModel(spec, embedding_VD=embedding, layers=layers, norm_D=norm, head=head)


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        ConfigError: not a device of this machine; names ``model.device``.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device: {name!r} is not a torch device") from error
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(f"model.device: {name!r} is neither cpu nor cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"model.device: this machine has no {name!r}")
    return device


def resolve_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """Weight and KV type. Raises ConfigError naming ``model.dtype``."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint
    if name not in _DTYPES:
        raise ConfigError(f"model.dtype: {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _read_layer(spec: TargetSpec, weights: _Weights, index: int) -> Layer:
    path = f"model.layers.{index}"
    width, head = spec.hidden_size, spec.head_dim
    query, key = spec.num_heads * head, spec.num_kv_heads * head
    inner = spec.intermediate_size

    def linear(parts: Sequence[tuple[str, int]], inputs: int, bias: bool) -> PackedLinear:
        weight = [weights.take(f"{path}.{name}.weight", (n, inputs)) for name, n in parts]
        biases = [weights.take(f"{path}.{name}.bias", (n,)) for name, n in parts if bias]
        return _linear(torch.cat(weight), torch.cat(biases) if biases else None)

    qk_norm = None
    if spec.qk_norm:
        q_norm = weights.take(f"{path}.self_attn.q_norm.weight", (head,))
        k_norm = weights.take(f"{path}.self_attn.k_norm.weight", (head,))
        qk_norm = torch.cat(
            [q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)]
        )
    q, k, v = (f"self_attn.{part}_proj" for part in "qkv")
    return Layer(
        qkv=linear([(q, query), (k, key), (v, key)], width, spec.attention_bias),
        out=linear([("self_attn.o_proj", width)], query, spec.attention_bias),
        gate_up=linear([("mlp.gate_proj", inner), ("mlp.up_proj", inner)], width, spec.mlp_bias),
        down=linear([("mlp.down_proj", width)], inner, spec.mlp_bias),
        attention_norm=weights.take(f"{path}.input_layernorm.weight", (width,)),
        mlp_norm=weights.take(f"{path}.post_attention_layernorm.weight", (width,)),
        qk_norm=qk_norm,
        window=spec.windows[index],
    )


def _linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> PackedLinear:
    outputs, inputs = weight_OI.shape
    linear = nn.Linear(inputs, outputs, bias=bias_O is not None, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias_O is not None:
        linear.bias = nn.Parameter(bias_O, requires_grad=False)
    return PackedLinear(linear)


class _Weights:
    """Tensors of a folder, each taken once, converted and checked on the way."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self._tensors = TensorFolder(folder)
        self._device = device
        self._dtype = dtype
        self._left = set(self._tensors.shapes)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.get(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._tensors.path}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"the configuration asks for {shape}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self._tensors.path}: tensor {name!r} is {tensor.dtype}")
        self._left.discard(name)
        return tensor.to(self._device, self._dtype)

    def ignore(self, name: str) -> None:
        """A tensor that transformers does not read either."""
        self._left.discard(name)

    def finish(self) -> None:
        # Old checkpoints saved the rotary frequencies, which follow from the configuration.
        left = sorted(name for name in self._left if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise CheckpointError(
                f"{self._tensors.path}: tensor {left[0]!r} has no place in this architecture"
            )
