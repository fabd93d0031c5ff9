"""Frames that any member may send to any other: greeting, refusal, signs of life."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.wire.fields import Frame, natural, string


@dataclass(frozen=True, kw_only=True, eq=False)
class Hello(Frame):
    """First frame of both ends of every stream."""

    role: str = string(16)
    """``router``, ``verifier``, ``drafter`` or ``probe``."""
    member_id: str = string()
    incarnation: int = natural()
    """Rises whenever the member restarts (start time in ns)."""
    model: str = string()
    """Fingerprint of the target model; empty if the member does not know one."""
    drafter: str = string()
    """Fingerprint of the drafter checkpoint; empty for none."""
    token: str = string()
    """Shared cluster secret, empty where the cluster has none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Refused(Frame):
    """A typed refusal. After a fatal one the sender closes the stream."""

    code: str = string()
    """Class name in `cluster.errors`."""
    message: str = string(4096)
    fatal: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Ping(Frame):
    """Keeps a lease alive and measures the round trip; answered by `Pong`."""

    nonce: int = natural()


@dataclass(frozen=True, kw_only=True, eq=False)
class Pong(Frame):
    """Answer to `Ping` with its nonce."""

    nonce: int = natural()


@dataclass(frozen=True, kw_only=True, eq=False)
class Drain(Frame):
    """The sender will go away: give it no new work; what it has will be finished."""

    deadline_s: float
