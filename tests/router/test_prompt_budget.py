"""How much prompt goes beside the rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.prompt_budget import chunk_tokens, least_chunk, stretch


def test_everything_goes_that_fits() -> None:
    assert chunk_tokens(lambda n: 0.01 + 1e-5 * n, limit_s=1.0, least=8, most=500) == 500


def test_the_limit_binds() -> None:
    chunk = chunk_tokens(lambda n: 0.01 + 1e-4 * n, limit_s=0.02, least=8, most=500)
    assert 90 <= chunk <= 100


def test_some_goes_whatever_it_takes() -> None:
    assert chunk_tokens(lambda n: 1.0 + n, limit_s=0.01, least=8, most=500) == 8
    assert chunk_tokens(lambda n: 1.0 + n, limit_s=0.01, least=8, most=5) == 5


@given(
    per_token=st.floats(1e-6, 1e-2),
    limit=st.floats(0.0, 2.0),
    least=st.integers(0, 64),
    most=st.integers(0, 4096),
    cliff=st.integers(1, 4096),
)
def test_as_much_as_the_limit_allows_over_a_cliff_too(
    per_token: float, limit: float, least: int, most: int, cliff: int
) -> None:
    def step_s(num_tokens: int) -> float:
        return 0.01 + per_token * num_tokens + 0.3 * (num_tokens >= cliff)

    chunk = chunk_tokens(step_s, limit_s=limit, least=least, most=most)
    assert min(least, most) <= chunk <= most
    if chunk > min(least, most):
        assert step_s(chunk) <= limit
    larger = chunk + max(chunk // 16, 1) + 1
    if larger <= most:
        assert step_s(larger) > limit


def test_the_least_chunk_is_a_share_of_the_most() -> None:
    assert [least_chunk(most) for most in (0, 1, 8, 256)] == [0, 1, 1, 32]


def test_requests_that_wait_and_those_that_decode_share_the_verifier_by_number() -> None:
    assert stretch(1.0, num_waiting=1, num_decoding=64) == 1.0, "as configured"
    assert stretch(0.3, num_waiting=8, num_decoding=16) == 0.5
    assert stretch(1.0, num_waiting=60, num_decoding=4) == 15.0
