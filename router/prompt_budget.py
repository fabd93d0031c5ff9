"""How many prompt tokens a step computes beside its verify rows. Pure.

A long prompt is computed in chunks, so that nobody waits for the whole of it: a chunk makes the
step that carries it longer by a bounded share, or fills time in which the verifier has nothing to
verify. And some tokens go with every step, so that decoding never starves a prompt.

Where more requests wait for their prompts than decode, the share is theirs by number: every request
has the same part of the verifier's time, whichever it needs it for. A few that decode quickly would
otherwise hold up a queue for steps that are hardly filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_LEAST_SHARE: Final = 8


def least_chunk(most: int) -> int:
    """Prompt tokens that a step always has room for, of a budget of at most ``most``."""
    return max(most // _LEAST_SHARE, min(most, 1))


def stretch(least: float, *, num_waiting: float, num_decoding: int) -> float:
    """By which share chunks may lengthen steps.

    Args:
        least: whoever waits.
        num_waiting: requests whose prompts are not computed yet.
        num_decoding: rows of the step, at least 1.
    """
    return max(least, num_waiting / num_decoding)


def chunk_tokens(step_s: Callable[[int], float], *, limit_s: float, least: int, most: int) -> int:
    """The largest chunk with which the step takes at most ``limit_s``.

    Args:
        step_s: predicted seconds of the step with a chunk of so many tokens; does not fall.
        least: granted whatever it takes.
        most: not exceeded, nor is it by ``least``.
    """
    least = min(least, most)
    if step_s(most) <= limit_s:
        return most
    fits, exceeds = least, most
    while exceeds - fits > max(fits // 16, 1):
        middle = (fits + exceeds) // 2
        if step_s(middle) <= limit_s:
            fits = middle
        else:
            exceeds = middle
    return fits
