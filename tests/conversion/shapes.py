"""Sizes of published decoders, as their config.json has them."""

from typing import Any

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size")  # fmt: skip
COMMON = {
    "model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
}  # fmt: skip


def llama(*sizes: int, **more: Any) -> dict[str, Any]:
    """A config with sizes in the order of NAMES."""
    return COMMON | dict(zip(NAMES, sizes, strict=True)) | more


TIED = {"tie_word_embeddings": True}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": False}
SHAPES: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM-135M": llama(576, 1536, 30, 9, 3, 49152, **TIED),
    "HuggingFaceTB/SmolLM-360M": llama(960, 2560, 32, 15, 5, 49152, **TIED),
    "HuggingFaceTB/SmolLM-1.7B": llama(2048, 8192, 24, 32, 32, 49152, **TIED),
    "meta-llama/Llama-2-7b-hf": llama(4096, 11008, 32, 32, 32, 32000),
    "meta-llama/Meta-Llama-3-8B": llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/Llama-3.1-8B-Instruct": llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/Llama-3.2-1B": llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, **TIED),
    "mistralai/Mistral-7B-v0.3": llama(4096, 14336, 32, 32, 8, 32768, model_type="mistral", sliding_window=None),
    "Qwen/Qwen2.5-0.5B": llama(896, 4864, 24, 14, 2, 151936, **TIED, **QWEN2),
    "Qwen/Qwen2.5-7B": llama(3584, 18944, 28, 28, 4, 152064, **QWEN2),
}
