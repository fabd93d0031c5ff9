"""Constraints on answers in vLLM's words, judged by the backend that will compile them."""

from __future__ import annotations

from typing import Any, Final

from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from cluster.constraints import read_choices
from cluster.errors import BadConstraint

_MAX_FORMS: Final = 256
"""Remembered as judged: a request's is asked for several times, and many requests share one."""


class Forms:
    """See the module.

    Args:
        config: vLLM's.
        manager: its structured output manager, which has the tokenizer.
    """

    def __init__(self, config: Any, manager: Any) -> None:
        self._config = config
        self._tokenizer = getattr(manager, "tokenizer", None)
        self._forms: dict[tuple[str, str], StructuredOutputsParams] = {}

    def read(self, kind: str, text: str) -> StructuredOutputsParams | None:
        """A constraint (see `cluster.constraints`) for sampling parameters; None for no kind.

        Raises:
            BadConstraint: vLLM refuses it.
        """
        if not kind:
            return None
        form = self._forms.get((kind, text))
        if form is None:
            form = self._forms[kind, text] = self._judged(kind, text)
            if len(self._forms) > _MAX_FORMS:
                self._forms.pop(next(iter(self._forms)))
        return form

    def _judged(self, kind: str, text: str) -> StructuredOutputsParams:
        params = SamplingParams(temperature=0.0, structured_outputs=_params(kind, text))
        try:
            params.verify(
                self._config.model_config,
                self._config.speculative_config,
                self._config.structured_outputs_config,
                self._tokenizer,
            )
        except Exception as error:  # backends raise what they like
            reason = " ".join(str(error).split())[:600]
            raise BadConstraint(f"{kind}: {reason}") from error
        # Judging rewrites it: a choice becomes a grammar, and it knows its backend.
        return params.structured_outputs


def _params(kind: str, text: str) -> StructuredOutputsParams:
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        return StructuredOutputsParams(json=text)
    if kind == "choice":
        return StructuredOutputsParams(choice=list(read_choices(text)))
    if kind == "regex":
        return StructuredOutputsParams(regex=text)
    assert kind == "grammar", kind
    return StructuredOutputsParams(grammar=text)
