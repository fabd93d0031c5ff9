"""Admission: what passes the checks can be served, and the queue's bounds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.constraints import KINDS
from cluster.errors import (
    BadConstraint,
    BadSamplingParameter,
    DSparkError,
    InvalidRequest,
    Overloaded,
    UnknownAdapter,
)
from cluster.wire import MAX_BIASES, MAX_TOP_K, Sampling, Submit, decode, encode
from router.admission import ModelLimits, WaitingQueue, check_request
from router.lane_request import LaneRequest
from router.relay import request_of, submit_of
from router.request import GenerateRequest
from router.step_frame import admission_of
from router.ticket import Ticket
from tests.frames import make_sampling, make_step
from tests.router.harness import CharTokenizer, make_request

LIMITS = ModelLimits(vocab_size=4096, max_model_len=256, eos_ids=(0, 5), fingerprint="t")


def ticket_of(request: GenerateRequest) -> Ticket:
    most = check_request(request, LIMITS)
    return Ticket(
        request,
        max_new_tokens=most,
        eos_ids=LIMITS.eos_ids,
        tokenizer=CharTokenizer(),
        now=0.0,
    )


def biased(num: int) -> Sampling:
    return make_sampling(
        bias_ids=np.arange(num, dtype=np.int32), bias_values=np.zeros(num, np.float32)
    )


floats = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    """Requests of any shape, most of them at or past some limit."""
    num_biases = draw(st.sampled_from([0, 1, MAX_BIASES, MAX_BIASES + 1]))
    sampling = make_sampling(
        temperature=draw(st.sampled_from([0.0, 1.0]) | floats),
        top_k=draw(st.integers(-1, 1 << 34)),
        top_p=draw(st.just(1.0) | floats),
        min_p=draw(st.just(0.0) | floats),
        seed=draw(st.integers(0, 1 << 65)),
        bias_ids=np.arange(num_biases, dtype=np.int32),
        bias_values=np.full(num_biases, draw(st.just(1.0) | floats), np.float64).astype(np.float32),
    )
    return make_request(
        tuple(draw(st.lists(st.integers(0, 4095), max_size=3))),
        draw(st.integers(0, 1 << 40)),
        sampling=sampling,
        deadline_s=draw(st.none() | floats),
        target_rate=draw(st.just(0.0) | floats),
        tier=draw(st.sampled_from(["", "batch", "gold", "x" * 65])),
        constraint_kind=draw(st.sampled_from(["", *KINDS, "x" * 17])),
        constraint=draw(
            st.sampled_from(["", "{}", '["a"]', "x" * 65536, "x" * 65537, "é" * 32768, "\ud800"])
        ),
        adapter=draw(st.sampled_from(["", "sql", "x" * 128, "x" * 129, "\ud800"])),
        ignore_eos=draw(st.booleans()),
        request_id=draw(st.text(st.characters(codec="utf-8"), max_size=3)),
        stop_ids=(7,) * draw(st.sampled_from([0, 1000, 1001])),
        stop_strings=("x" * draw(st.integers(0, 1025)),) * draw(st.sampled_from([0, 64, 65])),
    )


@given(requests())
@example(make_request((1,), sampling=make_sampling(top_k=MAX_TOP_K)))
@example(make_request((1,), sampling=biased(MAX_BIASES)))
@example(make_request((1,), deadline_s=math.inf))
@example(make_request((1,), constraint_kind="regex", constraint="x" * 65536, adapter="x" * 128))
@example(
    make_request((1,), constraint_kind="json_schema", constraint='{"a":"' + "é" * 32764 + '"}')
)
@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_what_is_admitted_fits_every_frame_that_carries_it(request_: GenerateRequest) -> None:
    """A request that could not be encoded would end the lane, or the stream, of all others."""
    try:
        ticket = ticket_of(request_)
    except DSparkError:
        return
    submit = submit_of(ticket, 0.0, loan=1)
    assert decode(encode(submit)) == submit
    lane_request = LaneRequest(
        rid=1,
        ids=list(ticket.ids),
        num_prompt=ticket.num_prompt,
        max_new_tokens=ticket.max_new_tokens,
        stop_ids=ticket.stop_ids,
        sampling=request_.sampling,
        draft=True,
        constraint_kind=request_.constraint_kind,
        constraint=request_.constraint,
        adapter=request_.adapter,
    )
    step = make_step(admissions=(admission_of(lane_request),))
    assert decode(encode(step)) == step


@pytest.mark.parametrize(
    ("error", "request_"),
    [
        (BadSamplingParameter, make_request((1,), sampling=make_sampling(top_k=MAX_TOP_K + 1))),
        (BadSamplingParameter, make_request((1,), sampling=biased(MAX_BIASES + 1))),
        (InvalidRequest, make_request((1,), deadline_s=math.inf)),
        (InvalidRequest, make_request((1,), deadline_s=math.nan)),
        (
            BadConstraint,
            make_request((1,), constraint_kind="regex", constraint="x" * 65537),
        ),
        (BadConstraint, make_request((1,), constraint_kind="json_schema", constraint="[]")),
        (BadConstraint, make_request((1,), constraint="{}")),
        (UnknownAdapter, make_request((1,), adapter="x" * 129)),
    ],
)
def test_what_no_frame_can_carry_is_refused(
    error: type[DSparkError], request_: GenerateRequest
) -> None:
    with pytest.raises(error) as caught:
        check_request(request_, LIMITS)
    assert caught.value.hint


def test_a_prompt_of_exactly_the_limit() -> None:
    assert check_request(make_request((1,) * 255, 9), LIMITS) == 1
    with pytest.raises(InvalidRequest, match="256 tokens"):
        check_request(make_request((1,) * 256, 9), LIMITS)


def test_a_request_larger_than_the_whole_queue_waits_alone() -> None:
    """It could never be admitted otherwise, however idle the verifiers are."""
    queue = WaitingQueue[Ticket](max_requests=4, max_tokens=50)
    large, small = ticket_of(make_request((1,), 100)), ticket_of(make_request((1,), 10))
    queue.push(large)
    with pytest.raises(Overloaded) as caught:
        queue.push(small)
    assert caught.value.retry_after_s > 0
    queue.remove(large, 1.0)
    queue.push(small)
    with pytest.raises(Overloaded):
        queue.push(large)
    assert queue.num_tokens == 11


def test_a_lent_request_keeps_its_target_and_tier() -> None:
    request = make_request((1, 2), target_rate=12.5, tier="batch")
    lent = request_of(decode_submit(encode(submit_of(ticket_of(request), 0.0, loan=1))))
    assert (lent.target_rate, lent.tier) == (12.5, "batch")


def test_a_lent_request_keeps_its_constraint_and_adapter() -> None:
    asked = {"constraint_kind": "choice", "constraint": '["né"]', "adapter": "sql"}
    ticket = ticket_of(make_request((1, 2), **asked))
    lent = request_of(decode_submit(encode(submit_of(ticket, 0.0, loan=1))))
    assert {name: getattr(lent, name) for name in asked} == asked


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", "a+"), ("json_object", ""), ("json_schema", "{}"), ("choice", '["a"]')],
)
def test_a_constraint_wants_the_end_of_sequence(kind: str, text: str) -> None:
    """A form that is complete allows nothing but the end: without it, what comes is of no form."""
    constrained = make_request((1,), constraint_kind=kind, constraint=text)
    check_request(constrained, LIMITS)
    with pytest.raises(BadConstraint, match="ignore_eos") as caught:
        check_request(dataclasses.replace(constrained, ignore_eos=True), LIMITS)
    assert caught.value.hint
    check_request(make_request((1,), ignore_eos=True), LIMITS)


def decode_submit(data: bytes) -> Submit:
    frame = decode(data)
    assert isinstance(frame, Submit)
    return frame


@pytest.mark.parametrize("changes", [{"tier": "gold"}, {"target_rate": math.inf}])
def test_a_service_that_nobody_offers_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        check_request(make_request((1, 2), **changes), LIMITS)
