"""Folders of tiny models with tokenizers of every kind, for comparisons with transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from attnlab.pretrained import huggingface
from tests.conversion.models import FAMILIES

TEXTS = ["The sun is in the house.", "The number of the man is 12345.", "A house of the sun, and all of it."] * 4
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
FIRST, LAST, TURN = "<s>", "</s>", "<|eot|>"


def _bytes(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _sentence_pieces(special: list[str]) -> Tokenizer:
    """As Llama 2 and Mistral: a space before the text, and bytes for other letters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    pieces = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _added(tokenizer: Tokenizer, single: str) -> Tokenizer:
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in single.split() if mark != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=marks)
    return tokenizer


def _prefixed() -> Tokenizer:
    tokenizer = _bytes([FIRST, LAST, TURN])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _added(tokenizer, f"{FIRST} $A")


PLAIN = [FIRST, LAST, TURN]
# family, tokenizer, bos_token, eos_token, tokens in the generation config that end a text (None: no such file)
KINDS: dict[str, tuple[str, Callable[[], Tokenizer], str | None, str, list[str] | None]] = {
    "bos": ("llama", lambda: _added(_bytes(PLAIN), f"{FIRST} $A"), FIRST, LAST, [LAST]),
    "gpt2": ("gpt2", lambda: _bytes(["<|endoftext|>"]), "<|endoftext|>", "<|endoftext|>", None),
    "no-bos": ("qwen2", lambda: _bytes(PLAIN), None, TURN, [TURN, LAST]),
    "several-ends": ("llama3", lambda: _added(_bytes(PLAIN), f"{FIRST} $A"), FIRST, TURN, [LAST, TURN]),
    "both": ("llama", lambda: _added(_bytes(PLAIN), f"{FIRST} $A {LAST}"), FIRST, LAST, [LAST]),
    "same": ("llama", lambda: _added(_bytes(PLAIN), f"{LAST} $A"), LAST, LAST, [LAST]),
    "pieces": ("mistral", lambda: _added(_sentence_pieces(PLAIN), f"{FIRST} $A"), FIRST, LAST, None),
    "prefixed": ("llama", _prefixed, FIRST, LAST, [TURN]),
}


def pretrained(folder: Path, kind: str, **sizes: Any) -> Path:
    """Write a model with random weights, of at most 96 positions, and its tokenizer."""
    from transformers import PreTrainedTokenizerFast

    family, build, bos, eos, ends = KINDS[kind]
    tokenizer = build()
    ids = {
        "bos_token_id": None if bos is None else tokenizer.token_to_id(bos),
        "eos_token_id": tokenizer.token_to_id(eos),
    }
    length = {"n_positions": 96} if family == "gpt2" else {"max_position_embeddings": 96}
    torch.manual_seed(0)
    options = FAMILIES[family] | ids | length | {"vocab_size": tokenizer.get_vocab_size() + 3} | sizes
    model: Any = huggingface.create("tiny", options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else nn.init.ones_(parameter)
    model.save_pretrained(folder)
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=TEMPLATE)
    words.save_pretrained(folder)
    if family == "qwen2":  # its folders name the class, which transformers takes for this type anyway
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if ends is not None:
        eos_ids = [tokenizer.token_to_id(end) for end in ends]
        file.write_text(json.dumps({**ids, "eos_token_id": eos_ids if eos_ids[1:] else eos_ids[0]}))
    return folder


def of_transformers(folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
