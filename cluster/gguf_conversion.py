"""Turn a GGUF file into a Hugging Face folder: fp32 safetensors, tokenizer, chat template.

Runs as its own process (``python -m cluster.gguf_conversion GGUF OUT``): the conversion needs
gigabytes for half a minute, and transformers' progress bars and log settings are global.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path


def convert(gguf: Path, out: Path) -> None:
    """Dequantise ``gguf`` (Llama architecture) and save it under ``out``.

    Raises:
        ValueError: the file holds another architecture than Llama.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if loaded.config.model_type != "llama":
        raise ValueError(f"{gguf.name} holds a {loaded.config.model_type} model, expected llama")
    # transformers refuses to save a model that it loaded from GGUF (it is marked as quantised), so
    # the weights move into a fresh one whose config lacks that mark.
    drop = {"quantization_config", "model_type", "transformers_version", "architectures"}
    drop |= {"_name_or_path", "_model_name_or_path"}
    config = {k: v for k, v in loaded.config.to_dict().items() if k not in drop}
    with torch.device("meta"):
        fresh = LlamaForCausalLM(LlamaConfig(**config))
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
