"""Export of T6 with multi-head, grouped-query or multi-query attention as transformers' LlamaForCausalLM."""

from typing import Any

import torch
from torch import nn

from attnlab.attention import MHA
from attnlab.export.weights import check_logits
from attnlab.models import T6, LanguageModel
from attnlab.pretrained import decoder

NEAR = 1e-5  # of float32 logits, relative to the largest


def refusal(model: LanguageModel) -> str | None:
    """The reason why a Llama cannot represent a model, or None."""
    kinds = {type(attention) for attention in model.attentions}
    if kinds != {MHA}:
        return f"a Llama has no {', '.join(sorted(kind.__name__ for kind in kinds - {MHA}))}"
    if type(model) is not T6:
        return f"{type(model).__name__} has other blocks than a Llama: norms, positions or output layer"
    attentions = [attention for attention in model.attentions if isinstance(attention, MHA)]
    sizes = {
        (a.num_heads, a.num_kv_heads, a.head_dim, a.rope_theta, a.rope_scaling, a.dropout, type(a.query_norm))
        for a in attentions
    }
    if len(sizes) > 1:
        return "a Llama has the same heads and rotary frequencies in every layer"
    first = attentions[0]
    if not isinstance(first.query_norm, nn.Identity):
        return "a Llama has no norms of queries and keys"
    if first.rope_theta is None or first.turned != first.head_dim:
        return "a Llama rotates whole heads, by frequencies that follow from a base"
    if first.d_model % first.num_heads:
        return f"LlamaConfig takes no hidden_size={first.d_model} that {first.num_heads} heads do not divide"
    return None


def convert(model: T6) -> Any:
    """Convert a model without a `refusal` to a LlamaForCausalLM in eval mode on the CPU.

    T6's norms have no weights: those of the Llama are 1, with the epsilon of T6, the machine's. Embeddings and output
    share their weights in both. If some projections have a bias, the others get one of zeros.

    Raises:
        DataError: the logits differ by more than 1e-5, absolute and relative to the largest.
    """
    first = model.attentions[0]
    assert isinstance(first, MHA) and first.rope_theta is not None
    dtype = model.embedding.weight.dtype
    rotary: dict[str, Any] = {"rope_theta": float(first.rope_theta), "rope_type": "default"}
    if (scaling := first.rope_scaling) is not None:
        rotary |= {"rope_type": "llama3", **vars(scaling)}
    options = {
        "model_type": "llama",
        "vocab_size": model.embedding.num_embeddings,
        "hidden_size": first.d_model,
        "intermediate_size": model.blocks[0].down.in_features,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "max_position_embeddings": model.max_length,
        "rms_norm_eps": torch.finfo(dtype).eps,
        "rope_parameters": rotary,
        "attention_bias": any(
            getattr(attention, name).bias is not None
            for attention in model.attentions
            for name in decoder.LINEARS.values()
        ),
        "attention_dropout": first.dropout,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    llama = decoder.unread(model, options, "T6")
    check_logits(model, llama, NEAR if dtype == torch.float32 else 0.05)
    return llama
