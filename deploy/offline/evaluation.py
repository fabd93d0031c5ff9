"""The runs of an evaluation: every drafter over the same prompts, seeds and regimes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cluster.errors import BadSamplingParameter, ConfigError
from cluster.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE, MODES
from deploy.offline.prompts import Prompt
from deploy.offline.records import Answer, Round
from deploy.offline.round_table import RoundTable, round_table
from deploy.offline.rounds import LocalPair, check_seed

Progress = Callable[[str, int], None]
"""Called with what runs and the tokens that it has come further."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run.

    Raises:
        ConfigError, BadSamplingParameter: a value out of its domain.
    """

    drafters: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    modes: tuple[str, ...] = MODES
    max_new_tokens: int = 128
    concurrency: int = 32
    seed: int = 0
    batch_sizes: tuple[int, ...] = ()
    """Sizes of the drafter's batch to try, in the first regime."""
    batch_prompts: int = 64
    """Prompts of those runs, spread evenly over the file."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for temperature in self.temperatures:
            if not (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
                raise BadSamplingParameter(
                    f"temperature {temperature!r} is out of range",
                    hint=f"0 for greedy, or {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}",
                )
        for name in ("drafters", "temperatures", "modes", "batch_sizes"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ConfigError(f"{name}: {list(values)} names one twice")
        counts = {"max_new_tokens": self.max_new_tokens, "concurrency": self.concurrency}
        counts |= {"batch_prompts": self.batch_prompts}
        for name, count in (*counts.items(), *(("batch size", b) for b in self.batch_sizes)):
            if count < 1:
                raise ConfigError(f"{name}: {count} is out of range", hint="at least 1")
        if self.batch_sizes and max(self.batch_sizes) > self.concurrency:
            raise ConfigError(
                f"batch size {max(self.batch_sizes)} is over the concurrency, {self.concurrency}",
                hint="no batch can be larger than the number of requests in flight",
            )

    @property
    def regimes(self) -> tuple[Regime, ...]:
        """Temperatures in order; greedy once, the others in each mode."""
        return tuple(
            Regime(temperature=temperature, mode=mode)
            for temperature in self.temperatures
            for mode in (self.modes if temperature else self.modes[:1])
        )

    def num_tokens(self, num_prompts: int) -> int:
        """Most tokens that all runs emit."""
        in_regimes = len(self.regimes) * num_prompts
        in_batches = len(self.batch_sizes) * min(num_prompts, self.batch_prompts)
        return len(self.drafters) * (in_regimes + in_batches) * self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A temperature and how drafts are accepted at it."""

    temperature: float
    mode: str
    """As a request says it; without meaning at temperature 0."""

    @property
    def name(self) -> str:
        """``greedy``, ``coupled`` or ``rejection``."""
        return self.mode if self.temperature > 0 else "greedy"

    @property
    def title(self) -> str:
        """For people."""
        return "greedy" if self.temperature == 0 else f"T={self.temperature:g}, {self.mode}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The rounds of one drafter in one regime."""

    drafter: str
    regime: Regime
    draft_batch: int | None
    """Bound of the drafter's batch; None: all that are wanted at once."""
    table: RoundTable
    num_lost: int
    """Draft sessions lost on the way: their requests went on plainly, so figures are too low."""

    @property
    def labels(self) -> dict[str, str | float]:
        """What tells its figures from others'."""
        regime = self.regime
        return {
            "drafter": self.drafter,
            "temperature": regime.temperature,
            "mode": regime.name,
        }

    @property
    def summary(self) -> str:
        """One line about it."""
        num_rounds, num_tokens = len(self.table), int(self.table.num_emitted.sum())
        length = f"accepted length {num_tokens / num_rounds:.2f}" if num_rounds else "nothing"
        title = _title(self.drafter, self.regime, self.draft_batch)
        return f"{title}: {length}, {num_tokens} tokens in {num_rounds} rounds"


def measure(
    plan: Plan,
    prompts: Sequence[Prompt],
    open_pair: Callable[[str], LocalPair],
    progress: Progress = lambda what, tokens: None,
) -> Iterator[Measured]:
    """Run everything, one drafter after the other.

    Args:
        open_pair: loads the pair of a drafter named in the plan.

    Raises:
        PromptTooLong: a prompt that the target cannot take.
    """
    for name in plan.drafters:
        yield from _measure_one(plan, name, open_pair(name), prompts, progress)


def _measure_one(
    plan: Plan, name: str, pair: LocalPair, prompts: Sequence[Prompt], progress: Progress
) -> Iterator[Measured]:
    """All runs of one drafter; a generator of its own, so that the pair goes before the next."""
    for regime in plan.regimes:
        yield _run(plan, pair, name, regime, prompts, None, progress)
    step = max(-(-len(prompts) // plan.batch_prompts), 1)
    for size in plan.batch_sizes:
        yield _run(plan, pair, name, plan.regimes[0], prompts[::step], size, progress)


def _run(
    plan: Plan,
    pair: LocalPair,
    drafter: str,
    regime: Regime,
    prompts: Sequence[Prompt],
    draft_batch: int | None,
    progress: Progress,
) -> Measured:
    what = _title(drafter, regime, draft_batch)
    rounds: list[Round] = []
    lost_before = pair.num_lost
    progress(what, 0)
    for event in pair.play(
        prompts,
        temperature=regime.temperature,
        mode=regime.mode,
        max_new_tokens=plan.max_new_tokens,
        concurrency=plan.concurrency,
        seed=plan.seed,
        draft_batch=draft_batch,
    ):
        if isinstance(event, Answer):  # its first token, and what it did not use
            progress(what, 1 + plan.max_new_tokens - len(event.token_ids))
        else:
            rounds.append(event)
            progress(what, event.num_emitted)
    table = round_table(
        rounds,
        prompts,
        max_new_tokens=plan.max_new_tokens,
        gamma=pair.gamma,
        stop_ids=pair.stop_ids,
    )
    return Measured(
        drafter=drafter,
        regime=regime,
        draft_batch=draft_batch,
        table=table,
        num_lost=pair.num_lost - lost_before,
    )


def _title(drafter: str, regime: Regime, draft_batch: int | None) -> str:
    batch = "" if draft_batch is None else f", batches of {draft_batch}"
    return f"{drafter}, {regime.title}{batch}"
