"""Frames between routers: what each knows of the speed of its verifiers and drafters."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.wire.fields import Frame, natural, string
from cluster.wire.limits import MAX_FRAME_BYTES


@dataclass(frozen=True, kw_only=True, eq=False)
class AskProfile(Frame):
    """Ask a router for its own profiles; answered by `Profile`."""

    nonce: int = natural()


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile(Frame):
    """Answer to `AskProfile` with its nonce."""

    nonce: int = natural()
    json: str = string(MAX_FRAME_BYTES)
    """An object, see `router.profile_report`."""
