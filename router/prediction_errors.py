"""How well a profile predicts, against how well anything could. Pure."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from typing import Final

from cluster.profile_snapshot import StepRecord
from router.step_load import StepLoad

_WINDOW: Final = 256
"""Latest steps that the figures speak of."""
_MAX_KEYS: Final = 256
_CONTEXT_STEP: Final = 0.02
"""Steps whose context differs by less count as equal."""


class PredictionErrors:
    """Errors of the latest steps, and the spread of equal steps about each other.

    The spread is the median of ``|log(t2 / t1)| / sqrt(2)`` over pairs of equal steps that follow
    one another: as large as the error of a prediction that knows the median exactly.
    """

    def __init__(self) -> None:
        self.recent: deque[StepRecord] = deque(maxlen=_WINDOW)
        self._errors: deque[float] = deque(maxlen=_WINDOW)
        self._sum = 0.0
        self._spreads: deque[float] = deque(maxlen=_WINDOW)
        self._last: OrderedDict[tuple[int, ...], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._errors)

    @property
    def median(self) -> float:
        """Of |predicted - actual| / actual; 0 without steps."""
        return statistics.median(self._errors) if self._errors else 0.0

    @property
    def mean(self) -> float:
        """The same, but a freak step counts in full."""
        return max(self._sum, 0.0) / len(self._errors) if self._errors else 0.0

    @property
    def spread(self) -> float:
        """0 until equal steps have been seen."""
        return statistics.median(self._spreads) if self._spreads else 0.0

    def add(self, load: StepLoad, predicted_s: float, step_s: float) -> None:
        """One executed step and what had been predicted for it."""
        error = abs(predicted_s - step_s) / step_s
        if len(self._errors) == _WINDOW:
            self._sum -= self._errors[0]
        self._errors.append(error)
        self._sum += error
        self.recent.append(
            StepRecord(
                num_rows=load.num_rows,
                num_tokens=load.num_tokens,
                num_prefill=load.num_prefill,
                sum_context=load.sum_context,
                num_pairs=round(load.pairs),
                predicted_s=predicted_s,
                step_s=step_s,
            )
        )
        context = int(math.log1p(load.sum_context) / _CONTEXT_STEP)
        key = (load.num_rows, load.num_tokens, load.num_prefill, context)
        if (before := self._last.pop(key, None)) is not None:
            self._spreads.append(abs(math.log(step_s / before)) / math.sqrt(2))
        self._last[key] = step_s
        if len(self._last) > _MAX_KEYS:
            self._last.popitem(last=False)
