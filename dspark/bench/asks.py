"""What is asked: a seeded mixture of prompts, samplings and lengths.

A request depends on the seed, on who asks and on how often that user has asked before, on nothing
that the server does. So two servers, or two settings of one, are asked the same things even where
one answers faster: common random numbers, without which the difference of two texts would pass for
one of speed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.adapter_name import check_adapter
from cluster.constraints import check_constraint
from cluster.errors import ConfigError
from cluster.prompt_file import TextPrompt
from cluster.sampling import MODES
from cluster.tiers import check_service
from dspark.messages import Options


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request to come."""

    prompt: TextPrompt
    temperature: float
    mode: str
    max_tokens: int
    seed: int
    draft: bool
    target_tokens_per_s: float | None
    tier: str
    adapter: str
    json_schema: str

    @property
    def options(self) -> Options:
        """For `generate`."""
        options = Options(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            mode=self.mode,
            seed=self.seed,
            draft=self.draft,
            tier=self.tier,
            adapter=self.adapter,
        )
        if self.target_tokens_per_s is not None:
            options["target_tokens_per_s"] = self.target_tokens_per_s
        if self.json_schema:
            options["json_schema"] = self.json_schema
        return options


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What requests are drawn from, each list evenly.

    Raises:
        ConfigError: an empty list, or a value that no server takes.
        InvalidRequest: a tier, target rate, adapter or schema that no server takes.
    """

    prompts: Sequence[TextPrompt]
    temperatures: Sequence[float] = (0.0,)
    modes: Sequence[str] = ("coupled",)
    max_tokens: Sequence[int] = (128,)
    draft: bool = True
    target_tokens_per_s: float | None = None
    tier: str = ""
    adapter: str = ""
    json_schema: str = ""
    """Its text, which every answer has to fit; empty for any answer."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "temperatures", "modes", "max_tokens"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: none given")
        for temperature in self.temperatures:
            if not 0 <= temperature < math.inf:
                raise ConfigError(f"temperature {temperature} is out of range", hint="0 is greedy")
        for mode in self.modes:
            if mode not in MODES:
                raise ConfigError(f"mode {mode!r} is not one of {', '.join(MODES)}")
        if min(self.max_tokens) < 1:
            raise ConfigError(f"max tokens {min(self.max_tokens)}", hint="at least 1")
        check_service(self.target_tokens_per_s or 0.0, self.tier)
        check_adapter(self.adapter)
        check_constraint("json_schema" if self.json_schema else "", self.json_schema)

    def ask(self, user: int, turn: int, *, midway: bool = False) -> Ask:
        """What ``user`` asks after ``turn`` answers.

        Args:
            midway: cut the answer at a random point of its length, as that of a user who has been
                at it for a while: users who begin together do not end together.
        """
        draw = random.Random(f"{self.seed}/{user}/{turn}")
        most = draw.choice(self.max_tokens)
        cut = draw.randint(1, most)
        return Ask(
            prompt=draw.choice(self.prompts),
            temperature=draw.choice(self.temperatures),
            mode=draw.choice(self.modes),
            max_tokens=cut if midway else most,
            seed=draw.getrandbits(64),
            draft=self.draft,
            target_tokens_per_s=self.target_tokens_per_s,
            tier=self.tier,
            adapter=self.adapter,
            json_schema=self.json_schema,
        )
