"""GGUF files of tiny models, written by gguf's own writer with the names and the layout that llama.cpp gives them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.pretrained.tokens import KINDS, TEMPLATE, pretrained

ARCHITECTURES = {"gpt2": "gpt2", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}  # all others are called llama
CONTROL, NORMAL, BYTE = 3, 1, 6


def written(folder: Path, kind: str = "bos", quantised: str = "F32", *, extra: Any = None, **sizes: Any) -> Path:
    """Write a model of `tests.pretrained.tokens` as a folder, and as a GGUF file whose weights the folder then has.

    Args:
        kind: of the tokenizer and the model.
        quantised: the type of the matrices.
        extra: called with the writer before it writes, to add what a file may have.
        sizes: of the model's config.
    """
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM

    family, wide = KINDS[kind][0], {"n_embd": 64} if KINDS[kind][0] == "gpt2" else {"hidden_size": 64}
    narrow = {} if family == "gpt2" else {"intermediate_size": 64}  # blocks have 32 values
    pretrained(folder / "model", kind, **wide | narrow | sizes)
    config: Any = AutoConfig.from_pretrained(folder / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    arch = ARCHITECTURES.get(config.model_type, "llama")
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    layers = config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(width)
        writer.add_value_length(width)
        if arch in ("llama", "phi3"):
            writer.add_rope_dimension_count(width)
        if arch == "phi3":
            writer.add_sliding_window(config.sliding_window)
        _rotary(writer, model, config.rope_parameters)
    _tokens(writer, kind, folder / "model")
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), layers)
    state, tied = model.state_dict(), config.tie_word_embeddings
    for name, value in state.items():
        if name == "lm_head.weight" and tied:
            continue
        stored = value.T if "c_" in name and value.dim() == 2 else value  # GPT-2 has the transposed matrices
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            stored = stored.reshape(heads, 2, -1, *stored.shape[1:]).transpose(1, 2).reshape(stored.shape)
        kind_of = gguf.GGMLQuantizationType[quantised if value.dim() == 2 else "F32"]
        data = gguf.quantize(stored.contiguous().numpy().astype(np.float32), kind_of)
        known = names.get_name(name, (".weight", ".bias"))
        assert known is not None
        writer.add_tensor(known, data, raw_dtype=kind_of)
        back = torch.from_numpy(np.array(gguf.dequantize(data, kind_of)).reshape(stored.shape))
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            back = back.reshape(heads, -1, 2, *back.shape[1:]).transpose(1, 2).reshape(back.shape)
        state[name].copy_(back.T if "c_" in name and value.dim() == 2 else back)
    if extra is not None:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.save_pretrained(folder / "model")
    return path


def _rotary(writer: Any, model: Any, rotary: dict[str, Any]) -> None:
    kind = rotary["rope_type"]
    if kind == "default":
        return
    if "original_max_position_embeddings" in rotary:
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
    if kind == "llama3":
        table = model.model.rotary_emb.inv_freq
        usual = rotary["rope_theta"] ** -(torch.arange(len(table)) / len(table))
        writer.add_tensor("rope_freqs.weight", (usual / table).numpy().astype(np.float32))
    else:
        writer.add_rope_scaling_type(gguf_scaling(kind))
        writer.add_rope_scaling_factor(rotary["factor"])


def gguf_scaling(kind: str) -> Any:
    import gguf

    return gguf.RopeScalingType(kind)


def _tokens(writer: Any, kind: str, folder: Path) -> None:
    """The vocabulary of a tokenizer.json, and its special tokens."""
    _, _, bos, eos, ends = KINDS[kind]
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    size, numbers = json.loads((folder / "config.json").read_text())["vocab_size"], vocabulary | special
    tokens = {number: word for word, number in numbers.items()}
    words = [tokens.get(number, f"[PAD{number}]") for number in range(size)]
    pieces = kind == "pieces"
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    if not pieces:
        writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    kinds = [CONTROL if word in special else NORMAL for word in words]
    if pieces:
        kinds = [BYTE if word.startswith("<0x") else kind for word, kind in zip(words, kinds, strict=True)]
        writer.add_token_scores([-float(number) for number in range(size)])
    writer.add_token_types(kinds)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    writer.add_token_merges(merges)
    if bos is not None:
        writer.add_bos_token_id(numbers[bos])
    writer.add_eos_token_id(numbers[eos])
    if others := [end for end in ends or () if end != eos]:
        writer.add_eot_token_id(numbers[others[0]])
    single = content["post_processor"] and content["post_processor"].get("single", [])
    writer.add_add_bos_token(bool(single) and "SpecialToken" in single[0])
    writer.add_add_eos_token(bool(single) and "SpecialToken" in single[-1])
    writer.add_chat_template(TEMPLATE)
