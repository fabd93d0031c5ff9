"""vLLM's worker, with a `RowTap` on its model runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vllm.platforms import current_platform

from verifier_service.projection import FeatureProjection, load_feature_projection
from verifier_service.vllm.v0_32.orders import StepRan
from verifier_service.vllm.v0_32.row_tap import RowTap

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

PATH: Final = f"{__name__}.TappedWorker"
DRAFTER_KEY: Final = "dspark_drafter"
TARGET_KEY: Final = "dspark_target"


class TappedWorker(BaseWorker):
    """One rank of a replica. All ranks judge alike (they hold the same logits, and draws are
    keyed); the first one hands out what it found, and the features."""

    def init_device(self) -> None:
        """Puts the tap on the runner, before its model is loaded."""
        super().init_device()
        runner = self.model_runner
        config = self.vllm_config.model_config.hf_text_config
        self._row_tap = RowTap(runner, self._projection(), config.num_hidden_layers)
        runner._sample = self._row_tap.sample
        runner.use_aux_hidden_state_outputs = bool(self._row_tap.aux_layers)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Names the layers to tap, before the model runs (and is compiled)."""
        super().load_model(*args, **kwargs)
        if self._row_tap.aux_layers:
            self.model_runner.model.set_aux_hidden_state_layers(self._row_tap.aux_layers)

    def execute_model(self, scheduler_output: Any) -> Any:
        """The forward pass of a step that `PlannedScheduler` formed."""
        self._row_tap.begin(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Judges the step. Sampling clears the hidden states and moves positions on: they are
        read before it."""
        runner = self.model_runner
        batch, state = runner.input_batch, runner.execute_model_state
        firsts = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        firsts = dict(zip(batch.req_ids, firsts, strict=True))
        output = super().sample_tokens(grammar_output)
        self._row_tap.finish(state, firsts)
        return output

    def take_ran(self) -> StepRan:
        """What the latest step computed; called by the core behind each step."""
        ran = self._row_tap.take()
        return ran if self.rank == 0 else StepRan()

    def forget_step(self) -> None:
        """A step died between the forward pass and its sampling."""
        self.model_runner.execute_model_state = None

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Overwrite KV that may hold NaN: vLLM's attention on a CPU multiplies what lies behind a
        request's end by 0 instead of leaving it out, so it would reach who gets the block next."""
        self.model_runner._zero_block_ids(block_ids)

    def _projection(self) -> FeatureProjection | None:
        extra = self.vllm_config.additional_config
        if self.rank != 0 or not extra.get(DRAFTER_KEY):
            return None
        return load_feature_projection(
            Path(extra[DRAFTER_KEY]),
            Path(extra[TARGET_KEY]),
            device=self.device,
            dtype=self.model_config.dtype,
        )
