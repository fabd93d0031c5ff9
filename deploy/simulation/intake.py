"""Clients of one cell: they arrive, wait, are placed into lanes, and get their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cluster.config import RouterConfig
from cluster.errors import Overloaded
from cluster.sampling import plain_sampling
from cluster.wire import FINISH_NONE, StepResult
from deploy.simulation.acceptance import AcceptanceModel
from deploy.simulation.clock import Clock
from deploy.simulation.lane import SimLane
from deploy.simulation.scoring import Scorer
from deploy.simulation.text import text
from deploy.simulation.traces import Arrival, Trace
from router.admission import WaitingQueue
from router.drafters import request_ids
from router.lane_request import Emission, Failed, LaneRequest, Outcome
from router.placement import choose_lane
from router.progress import Progress

_RETRY_S: Final = 1.0
"""A refused user of a closed loop comes again after this."""


class Client:
    """One request on its way; it outlives lanes."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.emitted: list[int] = []
        self.progress = Progress()
        self.last_at = 0.0

    @property
    def max_len(self) -> int:
        """Most positions."""
        return self.arrival.num_prompt + self.arrival.max_new_tokens


class Intake:
    """From arrival to last token.

    Args:
        lanes: by number; shared with the pools, which add and remove them.
        num_outputs: where the engines look up how long a text is.
    """

    def __init__(
        self,
        *,
        trace: Trace,
        config: RouterConfig,
        model: AcceptanceModel,
        lanes: dict[int, SimLane],
        num_outputs: dict[int, int],
        clock: Clock,
        scorer: Scorer,
    ) -> None:
        self._trace = trace
        self._arrivals = trace.open_arrivals()
        self._model = model
        self._lanes = lanes
        self._num_outputs = num_outputs
        self._clock = clock
        self._scorer = scorer
        self._rids: dict[int, Iterator[int]] = {}
        self._clients: dict[int, Client] = {}
        """By request id, those in lanes."""
        self._queue = WaitingQueue[Client](
            max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens
        )

    @property
    def num_queued(self) -> int:
        """Requests that wait for a lane."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests in lanes."""
        return len(self._clients)

    def start(self) -> None:
        """Begin to listen."""
        self._expect_next()

    def place(self) -> None:
        """Start what waits, oldest first, as long as there is room."""
        touched = set()
        for client in self._queue:
            number = choose_lane([lane.load(client.max_len) for lane in self._lanes.values()])
            if number is None:
                break
            self._queue.remove(client, self._clock.now)
            self._submit(client, self._lanes[number])
            touched.add(number)
        for number in sorted(touched):
            self._lanes[number].pump()

    def take_outcomes(self, lane: SimLane, result: StepResult, outcomes: list[Outcome]) -> None:
        """What a result means to the clients."""
        now, gaps = self._clock.now, []
        for outcome in outcomes:
            client = self._clients[outcome.rid]
            if isinstance(outcome, Emission):
                if client.emitted:
                    gaps.append(now - client.last_at)
                else:
                    self._scorer.first_token(now - client.arrival.at_s)
                client.last_at = now
                client.emitted.extend(outcome.token_ids)
                if outcome.finish != FINISH_NONE:
                    self._finish(outcome.rid)
            elif isinstance(outcome, Failed):
                del self._clients[outcome.rid]
                self._scorer.tally.num_failed += 1
            else:
                self._return([outcome.rid])
        self._scorer.step(lane, result, gaps)
        self.place()

    def take_back(self, lane: SimLane) -> None:
        """The lane is closed: its requests start anew elsewhere, with what they have."""
        self._return([rid for rid in self._clients if rid >> 32 == lane.number])
        self._rids.pop(lane.number, None)
        self.place()

    # --- arrivals -----------------------------------------------------------------------------

    def _expect_next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._clock.at(arrival.at_s, self._arrive_open, arrival)

    def _arrive_open(self, arrival: Arrival) -> None:
        self._expect_next()
        self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._scorer.tally.num_arrived += 1
        if not self._servable(arrival):
            self._scorer.tally.num_failed += 1
            return
        try:
            self._queue.push(Client(arrival))
        except Overloaded:
            self._scorer.tally.num_refused += 1
            self._come_again(_RETRY_S)
            return
        self.place()

    def _servable(self, arrival: Arrival) -> bool:
        """Whether any lane could ever take it; without lanes it waits for one."""
        max_len = arrival.num_prompt + arrival.max_new_tokens
        leases = [lane.state.lease for lane in self._lanes.values()]
        return not leases or any(
            max_len <= min(lease.max_model_len, lease.kv_blocks * lease.kv_block_tokens)
            for lease in leases
        )

    def _come_again(self, pause_s: float) -> None:
        """The user sends something else, if there is a user who waits for answers."""
        arrival = self._trace.after(self._clock.now + pause_s)
        if arrival is not None:
            self._clock.at(arrival.at_s, self._arrive, arrival)

    # --- lanes --------------------------------------------------------------------------------

    def _submit(self, client: Client, lane: SimLane) -> None:
        arrival, model = client.arrival, self._model
        self._num_outputs[arrival.key] = arrival.num_output
        rid = next(self._rids.setdefault(lane.number, request_ids(lane.number)))
        self._clients[rid] = client
        lane.submit(
            LaneRequest(
                rid=rid,
                ids=text(arrival.key, 0, arrival.num_prompt) + client.emitted,
                num_prompt=arrival.num_prompt,
                max_new_tokens=arrival.max_new_tokens,
                stop_ids=(),
                sampling=plain_sampling(model.temperature, mode=model.mode, seed=arrival.key),
                draft=True,
                target_rate=arrival.target_rate,
                tier=arrival.tier,
                progress=client.progress,
            )
        )

    def _finish(self, rid: int) -> None:
        client = self._clients.pop(rid)
        arrival, ids = client.arrival, client.emitted
        expected = text(arrival.key, arrival.num_prompt, arrival.num_prompt + arrival.num_output)
        assert ids == expected, f"request {arrival.key} got another text than its own"
        del self._num_outputs[arrival.key]
        self._scorer.finished(client.progress, arrival.target_rate)
        self._come_again(0.0)

    def _return(self, rids: list[int]) -> None:
        for rid in reversed(rids):
            client = self._clients.pop(rid)
            self._scorer.tally.num_returned += 1
            self._queue.push_front(client)
