"""A client's request on its way through the router: its text, usage and stream of events.

A ticket outlives lanes. Whatever happens to verifiers, it holds everything emitted so far, and
another lane goes on from there. It ends exactly once: with a last `Delta` or with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from cluster.errors import DSparkError, error_for
from cluster.wire import FINISH_REASONS, FINISH_STOP, Emit
from router.detokenizer import Detokenizer, StopScanner, Tokenizer
from router.lane_request import Emission
from router.progress import Progress
from router.request import Delta, GenerateRequest, Usage


class Ticket:
    """One admitted request.

    Args:
        request: as submitted, checked.
        max_new_tokens: the request's, cut to what the model's context leaves.
        eos_ids: end the request unless it ignores them.
        tokenizer: for the text.
        now: time of submission, seconds; the deadline counts from it.
        emitted: ids that another router emitted already, when the request comes from there.
        num_sent_chars: how much of their text the client has.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        tokenizer: Tokenizer,
        now: float,
        emitted: Sequence[int] = (),
        num_sent_chars: int = 0,
    ) -> None:
        self.request = request
        self.max_new_tokens = max_new_tokens
        self.stop_ids = tuple(
            dict.fromkeys([*request.stop_ids, *(() if request.ignore_eos else eos_ids)])
        )
        self.ids = [*request.ids, *emitted]
        self.deadline = None if request.deadline_s is None else now + request.deadline_s
        self.submitted = now
        self.first_token_at: float | None = None
        self.progress = Progress()
        """While it is in lanes of this router, which write it."""
        self.done = False
        self.outcome = ""
        """How it ended: a finish reason, or an error's name."""
        self.num_returns = 0
        """How often a lane or another router gave it back since it last got a token."""
        self.timer: asyncio.TimerHandle | None = None
        """Of its deadline."""
        self.usage = Usage(num_prompt_tokens=len(request.ids))
        self._tokenizer = tokenizer
        self._events: asyncio.Queue[Delta | DSparkError] = asyncio.Queue()
        # Unbounded, but never longer than the tokens that the request may emit.
        self._num_sent_chars = num_sent_chars
        self._relayed: Usage | None = None
        """Usage when the request was handed to another router, whose counts start at 0."""
        self.restore()

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.ids)

    @property
    def max_len(self) -> int:
        """Most positions that the request may come to occupy."""
        return self.num_prompt + self.max_new_tokens

    @property
    def num_emitted(self) -> int:
        """Tokens emitted so far, by whichever lane."""
        return len(self.ids) - self.num_prompt

    @property
    def num_sent_chars(self) -> int:
        """Characters of text that the client has."""
        return self._num_sent_chars

    # --- the client's side --------------------------------------------------------------------

    async def next(self) -> Delta:
        """The next delta; the one with a ``finish_reason`` is the last.

        Raises:
            DSparkError: the request ended with it.
        """
        event = await self._events.get()
        if isinstance(event, DSparkError):
            raise event
        return event

    # --- what happens to it -------------------------------------------------------------------

    def accept(self, emission: Emission, now: float) -> bool:
        """Take one round's tokens; whether the request is over (end it at the verifier, too)."""
        assert not self.done, "a request that is over gets no tokens"
        text, num_kept, stopped = self._read(emission)
        token_ids = emission.token_ids[:num_kept]
        self.ids.extend(token_ids)
        self.num_returns = 0
        if self.first_token_at is None:
            self.first_token_at = now
        usage = self.usage
        self.usage = replace(
            usage,
            num_completion_tokens=self.num_emitted,
            num_rounds=usage.num_rounds + emission.is_round,
            num_proposed=usage.num_proposed + emission.num_proposed,
            num_verified=usage.num_verified + emission.num_verified,
            num_accepted=usage.num_accepted + min(emission.num_accepted, num_kept),
        )
        finish = FINISH_REASONS[FINISH_STOP if stopped else emission.finish]
        logprobs = emission.logprobs[:num_kept] if self.request.sampling.logprobs else ()
        self._send(text, token_ids, logprobs, finish)
        return self.done

    def relay(self, emit: Emit) -> None:
        """Take one round's output from the router that serves the request."""
        assert not self.done, "a request that is over gets no tokens"
        if emit.error_code:
            self.fail(error_for(emit.error_code, emit.error_message))
            return
        if self._relayed is None:
            self._relayed = self.usage
        token_ids = tuple(emit.token_ids.tolist())
        self.ids.extend(token_ids)
        self.num_returns = 0
        base = self._relayed
        self.usage = replace(
            base,
            num_completion_tokens=self.num_emitted,
            num_rounds=base.num_rounds + emit.num_rounds,
            num_proposed=base.num_proposed + emit.num_proposed,
            num_verified=base.num_verified + emit.num_verified,
            num_accepted=base.num_accepted + emit.num_accepted,
        )
        logprobs = tuple(emit.logprobs.tolist()) if self.request.sampling.logprobs else ()
        self._send(emit.text, token_ids, logprobs, emit.finish)

    def restore(self) -> None:
        """Rebuild the text state from the ids: after another router had the request."""
        self._relayed = None
        self._detokenizer = Detokenizer(self._tokenizer)
        self._scanner = StopScanner(self.request.stop_strings)
        text, _ = self._scanner.push(self._detokenizer.push(self.ids[self.num_prompt :]))
        self._unsent = text[self._num_sent_chars :]

    def finish(self, reason: str) -> None:
        """End the request early, e.g. ``cancelled``. A no-op once it is over."""
        if not self.done:
            self._send("", (), (), reason)

    def fail(self, error: DSparkError) -> None:
        """End the request with an error. A no-op once it is over."""
        if not self.done:
            self.done, self.outcome = True, type(error).__name__
            self._events.put_nowait(error)

    # --- text ---------------------------------------------------------------------------------

    def _read(self, emission: Emission) -> tuple[str, int, bool]:
        """Text of a round, how many of its tokens count, and whether a stop string was found.

        With stop strings the ids go in one by one, so that the one that completes a match is known.
        """
        ids = emission.token_ids
        silent = emission.finish == FINISH_STOP and ids[-1] in self.stop_ids
        heard = ids[:-1] if silent else ids  # a stop id ends the text before itself
        pieces = [[token] for token in heard] if self.request.stop_strings else [list(heard)]
        text, self._unsent = self._unsent, ""
        for place, piece in enumerate(pieces):
            safe, stopped = self._scanner.push(self._detokenizer.push(piece))
            text += safe
            if stopped:
                return text, place + 1, True
        if emission.finish:
            safe, stopped = self._scanner.push(self._detokenizer.flush())
            text += safe
            if stopped:
                return text, len(ids), True
            text += self._scanner.flush()
        return text, len(ids), False

    def _send(
        self, text: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...], finish: str
    ) -> None:
        self._num_sent_chars += len(text)
        self.done, self.outcome = bool(finish), finish
        self._events.put_nowait(
            Delta(
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=finish,
                usage=self.usage,
            )
        )
