"""Tiny language models of transformers with random weights, one for each `model_type` of the families."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.pretrained import huggingface

WORDS = 61
IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "vocab_size": WORDS}
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, **IDS}
# the head width is not hidden_size / num_attention_heads
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
LLAMA = {**SIZES, **HEADS, "max_position_embeddings": 32}
SEPARATE = {**SIZES, "num_attention_heads": 3, "max_position_embeddings": 40}
GPT = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32, "n_inner": 40, **IDS}
OPTIONS: dict[str, dict[str, Any]] = {
    "bert": SEPARATE,
    "gemma3_text": {**LLAMA, "hidden_size": 30, "sliding_window": 4, "query_pre_attn_scalar": 6},
    "gpt2": GPT,
    "gpt_neox": SEPARATE,
    "gptj": {**GPT, "rotary_dim": 4},
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 4},
    "qwen2": {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen3": LLAMA,
    "olmo2": {**SEPARATE, "num_key_value_heads": 1},
    "phi": SEPARATE,
    "phi3": {**SEPARATE, "num_key_value_heads": 1, "sliding_window": 4},
    "roberta": SEPARATE,
    "smollm3": {**LLAMA, "no_rope_layers": [1, 0]},
}
OPTIONS["qwen2"].pop("head_dim")


def tiny(kind: str) -> nn.Module:
    return fill(huggingface.create("tiny", {"model_type": kind, **OPTIONS[kind]}))


@torch.no_grad()
def fill(model: nn.Module, scale: float = 0.2) -> nn.Module:
    """Set all parameters at random, so that each of them counts."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 if parameter.dim() < 2 else scale))
    return model.eval()


def ids(count: int = 2) -> Tensor:
    return torch.randint(3, WORDS, (count, 7), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """The logits of a language model, or the output of another model."""
    result = model(inputs)
    out: Tensor = result if isinstance(result, Tensor) else result.logits
    return out


VOCABULARY = ["[UNK]", "<pad>", "</s>", "the", "claim", "is", "true", "false"]


def words(pad: str | None = "<pad>", end: str | None = "</s>") -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", pad_token=pad, eos_token=end)


def saved(folder: Path, kind: str = "llama", **options: Any) -> nn.Module:
    model: Any = tiny(kind)
    model.save_pretrained(folder, **options)
    words().save_pretrained(folder)
    result: nn.Module = model
    return result


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def hostile(folder: Path, **values: Any) -> Path:
    """A model whose files name code of its folder, as trust_remote_code would run it -> what that code would make."""
    saved(folder)
    for name in ("config", "model", "words", "custom_generate/generate"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(f"import os\nos.makedirs({str(folder / 'ran')!r}, exist_ok=True)\n")
    models = dict.fromkeys(("AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"), "model.Model")
    named = {"AutoConfig": "config.Config", **models, "AutoTokenizer": ["words.Words", None]}
    edit(folder, auto_map=named, **values)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "Words", "auto_map": named}))
    return folder / "ran"
