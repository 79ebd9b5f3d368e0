"""Export of a trained language model for Hugging Face: a Llama, or a folder with modelling files."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from omegaconf import DictConfig
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from attnlab.attention import MHA, MLA
from attnlab.config.rules import SAMPLE
from attnlab.data.text.vocabulary import BytePairVocabulary, PretrainedVocabulary, Vocabulary, WordVocabulary
from attnlab.errors import ConfigError, DataError
from attnlab.export import deepseek, llama, proof, remote, serving
from attnlab.export.card import card
from attnlab.export.weights import CONFIG, README, check_logits, in_dtype, save, write_json
from attnlab.models import T6, Decoder, LanguageModel
from attnlab.pretrained import decoder, hub, huggingface
from attnlab.pretrained.weights import new_folder, write_files
from attnlab.run.markup import code, literal

log = logging.getLogger(__name__)

AUTO, FAST = "AutoTokenizer", "PreTrainedTokenizerFast"  # the second reads tokenizer.json as it is
SPECIAL = ("bos_token_id", "pad_token_id", "eos_token_id")

TOKENIZED = """tokenizer = {kind}.from_pretrained({folder})
inputs = tokenizer({prompt}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={new}){text}))"""
TRUST = """

With `trust_remote_code=True` transformers runs the Python files of this folder, which are copies of attnlab's own
source. Read them first, as with any such model. The tokenizer needs none of them:
{tokenizer} is the same, with a warning about the config."""


def export(
    model: LanguageModel,
    cfg: DictConfig,
    vocabulary: Vocabulary,
    record: Mapping[str, Any],
    folder: Path,
    layers: Sequence[Mapping[str, Any]] | None = None,
    format: Literal["hf", "vllm", "deepseek"] = "hf",
) -> Callable[[], dict[str, Any]] | None:
    """Write a language model as a folder that transformers loads without attnlab, replacing an earlier one.

    A T6 with multi-head, grouped-query or multi-query attention becomes a plain `LlamaForCausalLM`. A pretrained
    decoder with the attention of its family, or with fewer key-value heads, becomes a model of its original class. Any
    other gets modelling files from the sources of its classes, and decodes with its small cache. For vLLM a decoder
    with MLA becomes a `DeepseekV3ForCausalLM` instead, and the others are read by attnlab's plugin. Tokenizer, chat
    template and generation config of a pretrained model are copies of its own files.

    Args:
        layers: the nodes of each layer's attention in a converted model; None: `cfg.attention`.
        format: "vllm": a folder that vLLM decodes with the small cache, and a card with the command; "deepseek": the
            same, without refusing sizes that vLLM has no kernel for.

    Returns:
        If `prove.python` names an engine, the proof: it gives the section `serving` of the record.

    Raises:
        ConfigError: the code of the model cannot be exported, or vLLM cannot decode it.
        DataError: the exported model differs.
        WriteError: the folder cannot be written.
    """
    original = vocabulary if isinstance(vocabulary, PretrainedVocabulary) else None
    model = in_dtype(model, cfg)
    notes = _notes(vocabulary, model.longest)
    stock = _stock(model, cfg, format, original)
    converted, form, reason, served = stock.model, stock.form, stock.reason, format != "hf" and stock.served
    if served and cfg.prove.python:
        proof.check(form, model.longest, cfg.prove)
    if original is None:
        special: dict[str, Any] = dict.fromkeys(SPECIAL[:2], vocabulary.end)
        # as in mode=generate, no token ends a text, and ids without a token are never chosen
        unused = list(range(vocabulary.num_ids, vocabulary.size))
    else:
        special, unused = {name: original.config.get(name) for name in SPECIAL}, []
    generation = hub.transformers().GenerationConfig(**special, suppress_tokens=unused or None)
    files: dict[str, str] = {}
    if converted is None:
        log.info("%s: custom modelling files are written", reason)
        config, modules = remote.config_of(model, cfg, layers)
        config |= {"vocab_size": vocabulary.size, **special}
        files = remote.code_of(modules)
        notes.append(f"Not a plain Llama: {reason}.")
        notes.append("Batches may have padding on the left. Beam search works; assisted decoding does not.")
    kind: str | None = None  # class of the tokenizer

    def text_of(section: dict[str, Any] | None) -> str:
        return card(
            record,
            title=f"{record['task']}, {record['attention']}",
            python=_python(folder.name, vocabulary, model.longest, kind, bool(files)),
            folder=folder.name,
            usage=_usage(folder.name, kind, bool(files)),
            library="transformers",
            pipeline="text-generation",
            attentions=model.attentions,
            longest=model.longest,
            dtype=next(model.parameters()).dtype,
            notes=notes,
            serve=serving.section(form, folder.name, model, proof.table(section)) if served else None,
            has_code=bool(files),
        )

    if converted is not None and original is not None:
        for name, ids in special.items():
            setattr(converted.config, name, ids)
        converted.generation_config = generation
    with new_folder(folder) as place:
        if converted is not None:
            converted.save_pretrained(place)
            if form == "exact":
                node = json.loads((place / CONFIG).read_text(encoding="utf-8"))
                write_json(place / CONFIG, node | {"architectures": [deepseek.BY_TRANSFORMERS]})
        else:
            write_json(place / CONFIG, config)
            for name, source in files.items():
                (place / name).write_text(source, encoding="utf-8")
            save(place, model.state_dict(), prefix="model.")
        generation.save_pretrained(place)
        if original is not None:
            kind = _write_original(original, place)
        elif (words := tokenizer_of(vocabulary, model.longest, own=cfg.task.get("weights") is None)) is not None:
            words.save_pretrained(place)
            kind = FAST if files or not _is_auto(place, vocabulary) else AUTO
        (place / README).write_text(text_of(None), encoding="utf-8")
    if not served:
        return None
    log.info("serve it: vllm serve %s", serving.command(str(folder), serving.options(form, model, cpu=False)))
    ids, before = (vocabulary.num_ids, vocabulary.prefix), None if layers is None else _before(cfg)
    proved = partial(proof.prove, model, folder, form, text_of, *ids, **cfg.prove, original=before)
    return proved if cfg.prove.python else None


def _before(cfg: DictConfig) -> Path | None:
    """The folder of the model that was converted; None, with a warning if it is to be timed: there is none here."""
    folder = Path(str(cfg.task.weights)).expanduser()
    if folder.is_dir():
        return folder
    if cfg.prove.get("requests"):
        log.warning("prove.requests: %s is no folder, so that the original is not timed", folder)
    return None


def _notes(vocabulary: Vocabulary, longest: int) -> list[str]:
    """What the card says of the vocabulary."""
    notes = [f"Prompt and continuation together have at most {longest} tokens."]
    if isinstance(vocabulary, PretrainedVocabulary):
        return [*notes, "The tokenizer, its chat template and the generation config are those of the pretrained model."]
    notes += [
        f"Id {vocabulary.end} is the mark between texts: it stands before a prompt. Generation does not stop at it; "
        f"`eos_token_id={vocabulary.end}` does so.",
        f"The vocabulary has {vocabulary.num_ids} {vocabulary.unit}s.",
    ]
    if isinstance(vocabulary, WordVocabulary) and vocabulary.unknown_id is None:
        notes.append("A word that is not in the vocabulary is an error (Missing [UNK] token).")
    return notes


class Stock(NamedTuple):
    """A model of a class of transformers, or None with the reason, and how vLLM runs it."""

    model: Any
    form: serving.Form = "plain"
    reason: str | None = None
    served: bool = True


def _write_original(original: PretrainedVocabulary, folder: Path) -> str:
    """Copy the files of a pretrained model's tokenizer -> the class of transformers that reads them.

    DataError: transformers reads other ids than from the pretrained model's folder.
    """
    write_files(original.files, folder)
    if _is_auto(folder, original):
        return AUTO
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_bytes()) if file.is_file() else {}
    names = {"eos_token": original.mark} | ({} if original.bos is None else {"bos_token": original.beginning})
    write_json(file, names | settings | {"tokenizer_class": FAST})
    (folder / "tokenizer.json").write_text(original.json, encoding="utf-8")
    log.warning(
        "%s names %s, and tokenizer.json is written anew: for this type of model transformers reads other ids from "
        "the files of the pretrained model",
        file.name,
        FAST,
    )
    if not _is_auto(folder, original):
        raise DataError(f"{folder.name}: transformers reads other ids from the copied files of the tokenizer")
    return AUTO


def _stock(model: LanguageModel, cfg: DictConfig, format: str, original: PretrainedVocabulary | None) -> Stock:
    if type(model) is Decoder and _grouped(model):
        return Stock(_original(model, cfg, original))
    if (reason := llama.refusal(model)) is None:
        assert isinstance(model, T6)
        return Stock(llama.convert(model))
    if format == "hf":
        return Stock(None, "plugin", reason)
    if (refused := deepseek.refusal(model)) is not None:
        if format == "deepseek":
            raise ConfigError(f"format=deepseek: {refused}; use format=hf, or format=vllm for attnlab's plugin")
        serving.check_plugin(model, refused)
        log.info("attnlab's plugin for vLLM decodes it: %s", refused)
        return Stock(None, "plugin", reason)
    converted, form = deepseek.convert(model)
    try:
        serving.check_widths(converted.config.kv_lora_rank, cast(MLA, model.attentions[0]))
    except ConfigError as error:
        if format == "vllm" or cfg.prove.python is not None:
            raise
        log.warning("%s", error)
        return Stock(converted, form, served=False)
    return Stock(converted, form)


def _grouped(model: Decoder) -> bool:
    """Whether the layers have grouped-query attention as the model's original class."""
    attentions = [a for a in model.attentions if isinstance(a, MHA)]
    if len(attentions) < len(model.attentions) or len({a.num_kv_heads for a in attentions}) > 1:
        return False
    return model.positions is None or attentions[0].num_kv_heads == attentions[0].num_heads  # GPT-2 has no groups


def _original(model: Decoder, cfg: DictConfig, vocabulary: PretrainedVocabulary | None) -> Any:
    """The decoder as a model of its original class of transformers. DataError: the two differ."""
    source = str(cfg.task.weights)
    if vocabulary is not None:
        options = dict(vocabulary.config)
    else:
        options = dict(decoder.SAMPLE if source == SAMPLE else huggingface.config_of(source))
    first = model.attentions[0]
    assert isinstance(first, MHA)
    if "num_key_value_heads" in options:
        options["num_key_value_heads"] = first.num_kv_heads
    original = decoder.unread(model, options, source)
    check_logits(model, original, 1e-4 if model.embedding.weight.dtype == torch.float32 else 0.05)
    return original


def _python(folder: str, vocabulary: Vocabulary, longest: int, tokenizer: str | None, trust: bool) -> str:
    """The code of the card that loads the model. `tokenizer`: the class of transformers, or None without one."""
    prompt = "The"
    if isinstance(vocabulary, WordVocabulary):
        marks = vocabulary.words[vocabulary.end], vocabulary.unknown
        prompt = next(word for word in vocabulary.words if word not in marks)
    lines = [
        f"from transformers import AutoModelForCausalLM{f', {tokenizer}' if tokenizer else ''}\n",
        f"model = AutoModelForCausalLM.from_pretrained({literal(folder)}{', trust_remote_code=True' * trust})",
    ]
    if tokenizer:
        new = min(32, longest - 1 - len(vocabulary.ids(prompt)))
        of_source = isinstance(vocabulary, PretrainedVocabulary)
        text = "[0], skip_special_tokens=True" if of_source else "[0, 1:]"  # without the mark before the text
        shown = {"folder": literal(folder), "prompt": literal(prompt), "text": text}
        lines.append(TOKENIZED.format(kind=tokenizer, new=new, **shown))
    else:
        ids = f"torch.tensor([[{vocabulary.end}]])"
        lines.append(f"print(model.generate({ids}, max_new_tokens={min(32, longest - 1)})[0])")
    return "\n".join([*["import torch"] * (not tokenizer), *lines])


def _usage(folder: str, tokenizer: str | None, trust: bool) -> str:
    """What the card says below that code."""
    same = code(f"AutoTokenizer.from_pretrained({literal(folder)}, trust_remote_code=False)")
    without = "\n\nIts vocabulary has no form as a tokenizer of transformers: this folder has none." * (not tokenizer)
    return ", or its name on a hub." + TRUST.format(tokenizer=same) * trust + without


def tokenizer_of(vocabulary: Vocabulary, longest: int, own: bool = True) -> Any | None:
    """A `PreTrainedTokenizerFast` with the ids of `vocabulary`; None, with a warning, if it cannot have them.

    It adds the mark between texts before a text, as mode=generate does, unless called with `add_special_tokens=False`.
    The mark is the padding too, on the left, where attention masks hide it. It is decoded as a line end, except in
    the tokenizer of a pretrained model, which is not the run's `own`.
    """
    if isinstance(vocabulary, BytePairVocabulary):
        tokenizer = Tokenizer.from_str(vocabulary.json)
        mark = str(vocabulary.tokenizer.id_to_token(vocabulary.end))
    elif isinstance(vocabulary, WordVocabulary):
        tokenizer, mark = _of_words(vocabulary), vocabulary.words[vocabulary.end]
    else:
        log.warning("%s has no form as a tokenizer of transformers; none is written", type(vocabulary).__name__)
        return None
    if own and tokenizer.decoder is not None:
        line = decoders.Replace(Regex(f" ?{re.escape(mark)} ?" if vocabulary.unit == "word" else re.escape(mark)), "\n")
        tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Fuse(), line])
    marks = [(mark, vocabulary.end)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{mark} $A", pair=f"{mark} $A {mark} $B", special_tokens=marks
    )
    fast = hub.transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=mark,
        eos_token=mark,  # without one, llama.cpp ends a text at token 11
        pad_token=mark,
        padding_side="left",
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
    if wrong := _difference(fast, vocabulary):
        log.warning("%r has other ids in a tokenizer of transformers than in this vocabulary; none is written", wrong)
        return None
    return fast


def _is_auto(folder: Path, vocabulary: Vocabulary) -> bool:
    """Whether AutoTokenizer gives the ids of the vocabulary; for some types of models it replaces the saved class."""
    try:
        tokenizer = huggingface.tokenizer(str(folder))
    except DataError:  # the type of the model decides the class, and no class is known
        return False
    return _difference(tokenizer, vocabulary) is None


def _of_words(vocabulary: WordVocabulary) -> Tokenizer:
    numbers = {word: i for i, word in enumerate(vocabulary.words)}
    known = {"unk_token": vocabulary.unknown} if vocabulary.unknown in numbers else {}
    tokenizer = Tokenizer(models.WordLevel(numbers, **known))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="\n", cleanup=False)  # a space before each word
    if vocabulary.lower:
        tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def _difference(tokenizer: Any, vocabulary: Vocabulary) -> str | None:
    """A text with different ids in the tokenizer and in the vocabulary, or None."""
    if isinstance(vocabulary, WordVocabulary):
        texts = [word for i, word in enumerate(vocabulary.words) if i != vocabulary.end]
    else:
        ids = [i for i in range(vocabulary.num_ids) if i != vocabulary.end]
        texts = [vocabulary.text(ids[i : i + 50]) for i in range(0, len(ids), 50)]
    ids_by_text = tokenizer(texts, verbose=False).input_ids
    pairs = zip(texts, ids_by_text, strict=True)
    return next((text for text, ids in pairs if ids != vocabulary.begun(vocabulary.given(text))), None)
