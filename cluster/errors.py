"""The error tree. Every error knows its gRPC status code and its HTTP status.

    DSparkError                      INTERNAL             500
    ├── ConfigError                  INVALID_ARGUMENT     400   a config file or flag is wrong
    ├── InvalidRequest               INVALID_ARGUMENT     400   the user's request is wrong
    │   ├── PromptTooLong                                       prompt past the model's limit
    │   ├── TokenOutOfVocabulary                                an id the model does not have
    │   ├── BadSamplingParameter                                e.g. a negative temperature
    │   ├── BadConstraint                                       e.g. a schema that is no JSON
    │   └── UnknownAdapter                                      a LoRA adapter that is not loaded
    ├── Unsupported                  UNIMPLEMENTED        501   valid, but this engine cannot do it
    ├── PromptFileError              INVALID_ARGUMENT     400   prompts missing or malformed
    ├── ModelNotFound                NOT_FOUND            404   no such model, folder or request
    ├── ModelStoreError              FAILED_PRECONDITION  500   fetch or conversion failed
    │   └── HashMismatch                                        bytes are not the pinned ones
    ├── CheckpointError              FAILED_PRECONDITION  400   a checkpoint we cannot honour
    ├── TrainingError                FAILED_PRECONDITION  500   training cannot go on
    │   ├── DatasetError                                        data missing or of another target
    │   ├── TrainingDiverged                                    the loss is not finite any more
    │   └── StorageFull                                         no room for shards or checkpoints
    ├── FrameError                   INVALID_ARGUMENT     400   a frame that breaks the wire rules
    │   ├── FrameTooLarge                                       over a hard limit
    │   └── ProtocolMismatch                                    peers speak different versions
    ├── StaleFrame                   ABORTED              409   right shape, wrong epoch or prefix
    ├── LeaseError                   FAILED_PRECONDITION  409   not the holder of the lane
    ├── AuthError                    UNAUTHENTICATED      401   missing or wrong token
    ├── Overloaded                   RESOURCE_EXHAUSTED   429   bounded queue full; retry later
    ├── Unavailable                  UNAVAILABLE          503   a peer is gone
    ├── DeadlineExceeded             DEADLINE_EXCEEDED    504   the request's own deadline
    └── Cancelled                    CANCELLED            499   the client went away

gRPC codes are names, so that importing this module pulls in nothing.
"""

from __future__ import annotations

from typing import ClassVar


class DSparkError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        message: what is wrong, naming the offending value.
        hint: what the user can do about it; shown after the message.
    """

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(DSparkError, ValueError):
    """A configuration value is unknown, missing or out of range; names its path."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class InvalidRequest(DSparkError, ValueError):
    """The caller's request is malformed or out of range."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class PromptTooLong(InvalidRequest):
    """Prompt (plus room for one token) does not fit the model's context."""


class TokenOutOfVocabulary(InvalidRequest):
    """A token id is negative or not below the vocabulary size."""


class BadSamplingParameter(InvalidRequest):
    """A sampling parameter is outside its domain."""


class BadConstraint(InvalidRequest):
    """A constraint on the answer's form says nothing, or nothing that an engine understands."""


class UnknownAdapter(InvalidRequest):
    """The verifiers hold no LoRA adapter of this name."""


class Unsupported(DSparkError):
    """Well-formed, but this engine or version cannot honour it; never ignored silently."""

    grpc_code = "UNIMPLEMENTED"
    http_status = 501


class PromptFileError(DSparkError, ValueError):
    """A file of prompts is missing, empty or malformed; names the line."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class ModelNotFound(DSparkError):
    """No such model, checkpoint folder, application or request id."""

    grpc_code = "NOT_FOUND"
    http_status = 404


class ModelStoreError(DSparkError):
    """Fetching or converting a model failed."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 500


class HashMismatch(ModelStoreError):
    """Downloaded bytes do not have the pinned sha256."""


class CheckpointError(DSparkError, ValueError):
    """A checkpoint that cannot be honoured; the message names the field."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 400


class TrainingError(DSparkError):
    """A training run cannot start or go on; the last good checkpoint is kept."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 500


class DatasetError(TrainingError, ValueError):
    """Training data is missing, empty, or belongs to another target."""


class TrainingDiverged(TrainingError):
    """The loss or a gradient is no longer a finite number."""


class StorageFull(TrainingError):
    """The disk has no room for a feature shard or a checkpoint."""


class FrameError(DSparkError, ValueError):
    """A frame breaks the wire rules (unknown type, missing field, bad value)."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class FrameTooLarge(FrameError):
    """A frame or one of its fields exceeds a hard limit."""


class ProtocolMismatch(FrameError):
    """Peers speak different protocol versions or hold different models."""


class StaleFrame(DSparkError):
    """A well-formed frame for another incarnation, epoch, position or prefix."""

    grpc_code = "ABORTED"
    http_status = 409


class LeaseError(DSparkError):
    """The sender does not hold the lease of this verifier."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class AuthError(DSparkError):
    """Missing or wrong cluster token."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class Overloaded(DSparkError):
    """A bounded queue is full.

    Args:
        retry_after_s: seconds after which a retry may succeed.
    """

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint or f"retry in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class Unavailable(DSparkError):
    """A peer or pool that the request needs is gone."""

    grpc_code = "UNAVAILABLE"
    http_status = 503


class DeadlineExceeded(DSparkError):
    """The request's own deadline passed."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(DSparkError):
    """The client cancelled the request or went away."""

    grpc_code = "CANCELLED"
    http_status = 499


def error_for(code: str, message: str) -> DSparkError:
    """Rebuild an error from the code name that crossed the wire (class name of this tree)."""
    for cls in _all_errors(DSparkError):
        if cls.__name__ == code:
            return cls(message)
    return DSparkError(f"{code}: {message}")


def _all_errors(base: type[DSparkError]) -> list[type[DSparkError]]:
    return [base, *(sub for child in base.__subclasses__() for sub in _all_errors(child))]
