"""Adapter for vLLM 0.32 with its first model runner: CPU, and CUDA by the same runner.

All private names of vLLM that we rely on stand in this package, and `self_check` looks for each of
them at start-up. The second model runner (CUDA only) keeps drafts and probabilities elsewhere
(``req_states.draft_tokens``, ``speculator.draft_logits``) and samples inside a captured graph: it
needs an adapter of its own, so it is turned off here.
"""
