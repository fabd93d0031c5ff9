"""A ticket: text, usage and exactly one end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.errors import DSparkError, Unavailable
from cluster.wire import FINISH_LENGTH, FINISH_STOP, Emit
from router.lane_request import Emission
from router.relay import emit_of
from router.request import Delta
from router.ticket import Ticket
from tests.router.harness import EOS, CharTokenizer, make_request, text_of

PROMPT = (1, 2)


def ticket(**changes: Any) -> Ticket:
    options = {k: changes.pop(k) for k in ("emitted", "num_sent_chars") if k in changes}
    return Ticket(
        make_request(PROMPT, **changes),
        max_new_tokens=20,
        eos_ids=(EOS,),
        tokenizer=CharTokenizer(),
        now=0.0,
        **options,
    )


def emission(ids: tuple[int, ...], finish: int = 0, **counts: int) -> Emission:
    logprobs = tuple(-float(i) for i in ids)
    return Emission(rid=1, token_ids=ids, logprobs=logprobs, finish=finish, is_round=True, **counts)


async def drain(t: Ticket) -> list[Delta]:
    deltas = []
    while not deltas or not deltas[-1].finish_reason:
        deltas.append(await t.next())
    return deltas


async def test_usage_ends_where_the_text_ends() -> None:
    t = ticket(stop_strings=(text_of([5, 6]),))
    assert not t.accept(emission((3, 4), num_proposed=4, num_verified=4, num_accepted=1), 1.0)
    over = t.accept(emission((7, 5, 6, 8, 9), num_proposed=4, num_verified=4, num_accepted=4), 2.0)
    assert over
    *_, last = deltas = await drain(t)
    assert "".join(d.text for d in deltas) == text_of([3, 4, 7])
    assert t.ids == [*PROMPT, 3, 4, 7, 5, 6]
    assert last.token_ids == (7, 5, 6)
    assert last.usage.num_completion_tokens == 5
    assert (last.usage.num_rounds, last.usage.num_proposed) == (2, 8)
    assert last.usage.num_accepted == 1 + 3, "of the second round's 4 accepted 3 were emitted"
    assert t.first_token_at == 1.0


async def test_held_back_text_comes_out_at_the_end() -> None:
    t = ticket(stop_strings=(text_of([5, 6, 7]),))
    t.accept(emission((5,)), 0.0)
    t.accept(emission((6,), finish=FINISH_LENGTH), 0.0)
    deltas = await drain(t)
    assert [d.text for d in deltas] == ["", text_of([5, 6])]
    assert deltas[-1].finish_reason == "length"


async def test_stop_ids_are_no_text_and_length_does_not_hide_one() -> None:
    for stop in (EOS, 9):
        t = ticket(stop_ids=(9,))
        t.accept(emission((5, stop), finish=FINISH_STOP), 0.0)
        (delta,) = await drain(t)
        assert delta.text == text_of([5])
        assert delta.token_ids == (5, stop)
    t = ticket(stop_ids=(9,))
    assert t.stop_ids == (9, EOS)
    assert ticket(ignore_eos=True).stop_ids == ()


async def test_it_ends_once() -> None:
    t = ticket()
    t.finish("cancelled")
    t.fail(Unavailable("late"))
    t.finish("stop")
    (delta,) = await drain(t)
    assert delta.finish_reason == "cancelled"
    assert t.outcome == "cancelled"
    with pytest.raises(AssertionError):
        t.accept(emission((3,)), 0.0)


async def test_another_router_goes_on_without_repeating_text() -> None:
    stop = text_of([5, 6, 7])
    t = ticket(stop_strings=(stop,), emitted=(3, 4, 5), num_sent_chars=2)
    assert t.num_emitted == 3
    t.accept(emission((8,)), 0.0)
    t.accept(emission((5, 6, 7)), 0.0)
    deltas = await drain(t)
    assert [d.text for d in deltas] == [text_of([5, 8]), ""], "the held 5 is shown now, once"
    assert deltas[-1].usage.num_completion_tokens == 7


def relayed(seq: int, ids: tuple[int, ...], finish: str = "", **counts: int) -> Emit:
    emit = emit_of("x", 1, seq, Delta(text=text_of(list(ids)), token_ids=ids, finish_reason=finish))
    return Emit(**{**{f: getattr(emit, f) for f in emit.__dataclass_fields__}, **counts})


async def test_relayed_counts_add_to_what_was_counted_here() -> None:
    t = ticket()
    t.accept(emission((3,), num_proposed=4, num_verified=2, num_accepted=0), 0.0)
    t.relay(relayed(0, (4, 5), num_rounds=1, num_proposed=4, num_verified=4, num_accepted=1))
    t.restore()
    t.accept(emission((6,), num_proposed=4), 0.0)
    t.relay(relayed(0, (7,), finish="length", num_rounds=1, num_proposed=4))
    deltas = await drain(t)
    assert "".join(d.text for d in deltas) == text_of([3, 4, 5, 6, 7])
    usage = deltas[-1].usage
    assert (usage.num_rounds, usage.num_proposed, usage.num_accepted) == (4, 16, 1)
    assert usage.num_completion_tokens == 5


async def test_relayed_errors_keep_their_type() -> None:
    t = ticket()
    t.relay(emit_of("x", 1, 0, Unavailable("gone")))
    with pytest.raises(Unavailable, match="gone"):
        await t.next()
    assert t.outcome == "Unavailable"


def test_every_event_has_an_emit() -> None:
    delta = Delta(text="a", token_ids=(1,), logprobs=(-0.5,), finish_reason="stop")
    emit = emit_of("x", 1, 3, delta)
    assert (emit.seq, emit.text, emit.finish) == (3, "a", "stop")
    assert np.array_equal(emit.token_ids, [1])
    error = emit_of("x", 1, 0, DSparkError("bad"))
    assert (error.finish, error.error_code, error.error_message) == ("error", "DSparkError", "bad")
