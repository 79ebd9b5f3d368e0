"""Language models in Hugging Face's form: the same logits, the same texts, the same small cache."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attnlab.attention import MLA
from attnlab.data.samples import markov
from attnlab.data.text.vocabulary import BytePairs, BytePairVocabulary, Vocabulary, WordVocabulary, byte_tokenizer
from attnlab.decoding import Sampling
from attnlab.export import language, llama
from attnlab.export.modeling_attnlab import AttnlabCache, AttnlabConfig, AttnlabForCausalLM
from attnlab.models import Decoder, LanguageModel
from tests.export.trained import TENSORIZED, WORDS, config, ids, model_of, pieces, record


def exported(folder: Path, attention: str, **options: Any) -> tuple[LanguageModel, Path]:
    cfg = config(attention, **options)
    model = model_of(cfg)
    language.export(model, cfg, WORDS, record(attention), folder / attention)
    return model, folder / attention


def same_code(folder: Path) -> Any:
    """The exported model, by the classes that its files are copies of."""
    model = AttnlabForCausalLM(AttnlabConfig(**json.loads((folder / "config.json").read_text())))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def predicted(model: LanguageModel, rows: int, positions: int) -> int:
    return sum(a.cache_elements(rows, positions) for a in model.attentions) * 4


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code of folders to this place, as it would in a new process."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


@torch.no_grad()
@pytest.mark.usefixtures("modules")
def test_a_folder_is_loaded_with_its_own_code(tmp_path: Path) -> None:
    """Two of one name in one process, in which transformers has one model class for each config class."""
    import transformers

    tokens: Any = ids(1, 9)
    loaded: Any = None
    for attention in ("mla", "hybrid"):
        model, folder = exported(tmp_path, attention)
        place = tmp_path / f"{attention}-run" / "exported"
        place.parent.mkdir()
        folder.rename(place)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
        sources = {type(module).__module__.partition(".")[0] for module in loaded.modules()}
        assert sources == {"torch", "transformers_modules"}
        torch.testing.assert_close(loaded(tokens).logits, model(tokens), rtol=0, atol=1e-5)
        assert loaded.generate(tokens, max_new_tokens=8)[:, 9:].equal(Sampling(tokens=8, temperature=0)(model, tokens))
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert again(tokens).logits.equal(loaded(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("gqa", {}),
        ("mqa", {"bias": ["query", "value"]}),
        ("mha", {"rope_theta": 500.0, "head_dim": 6, "rope_scaling": {
            "_target_": "attnlab.attention.Llama3Scaling", "factor": 2.0, "original_max_position_embeddings": 8}}),
    ],
)  # fmt: skip
def test_a_plain_llama_has_the_same_logits(attention: str, options: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    model, folder = exported(tmp_path, attention, **options)
    assert not list(folder.glob("*.py"))
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    tokens = ids(2, 24)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens), rtol=0, atol=1e-5)
    expected = Sampling(tokens=8, temperature=0)(model, tokens[:, :9])
    mask = torch.ones_like(tokens[:, :9])
    assert loaded.generate(tokens[:, :9], attention_mask=mask, max_new_tokens=8)[:, 9:].equal(expected)
    assert sum(p.numel() for p in loaded.parameters()) >= sum(p.numel() for p in model.parameters())


def test_what_a_llama_cannot_hold() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("mtla", {}, "a Llama has no MTLA"),
        ("sliding_window", {}, "a Llama has no SlidingWindow"),
        ("hybrid", {}, "a Llama has no MTLA, SlidingWindow, TPA"),
        ("mha", {"qk_norm": True}, "no norms of queries and keys"),
        ("mha", {"num_heads": 5, "num_kv_heads": 5}, "hidden_size=32 that 5 heads do not divide"),
        ("mha", {"model": TENSORIZED}, "TensorizedTransformer has other blocks"),
    ]
    for attention, options, reason in cases:
        assert reason in str(llama.refusal(model_of(config(attention, **options)))), attention
    assert llama.refusal(model_of(config("mha"))) is None
    decoder = Decoder(9, 16, lambda _: MLA(16, 2, latent_dim=4, rope_dim=2), num_layers=1, ffn_dim=8)
    assert llama.refusal(decoder) == "a Llama has no MLA"


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("hybrid", {}),
        ("multilinear_summed", {"model": TENSORIZED}),
        pytest.param("mlra", {"branches": 2}, marks=pytest.mark.slow),
        pytest.param("mfa", {"reuse": True}, marks=pytest.mark.slow),
        pytest.param("gta", {}, marks=pytest.mark.slow),
    ],
)
def test_generation_with_the_small_cache(attention: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, folder = exported(tmp_path, attention, **options)
    loaded, tokens = same_code(folder), ids(2, 9)
    assert (folder / "modeling_attnlab.py").is_file()
    torch.testing.assert_close(loaded(tokens).logits, model(tokens), rtol=0, atol=1e-5)
    mask = torch.ones_like(tokens)

    def generate(**options: Any) -> Any:
        torch.manual_seed(0)
        options = {"attention_mask": mask, "max_new_tokens": 4, "pad_token_id": WORDS.end} | options
        return loaded.generate(tokens, return_dict_in_generate=True, **options)

    greedy = generate()
    assert greedy.sequences[:, 9:].equal(Sampling(tokens=4, temperature=0)(model, tokens))
    assert greedy.past_key_values.nbytes == predicted(model, 2, 9 + 4 - 1)  # the last token is not read
    assert greedy.past_key_values.get_seq_length() == greedy.past_key_values.get_max_length() == 12
    for how in ({"do_sample": True, "top_k": 5, "num_return_sequences": 2}, {"num_beams": 3}):
        cached, uncached = generate(**how), generate(**how, use_cache=False)
        assert cached.sequences.equal(uncached.sequences)
        assert uncached.past_key_values is None and cached.past_key_values.nbytes > 0
    for name in ("cache", "past_key_values"):  # the name from 5.24 on, and the one before
        prefix = loaded(tokens[:, :5], use_cache=True).past_key_values
        assert generate(**{name: prefix}).sequences.equal(greedy.sequences)
        assert prefix.get_seq_length() == 12 and not prefix.is_croppable


@torch.no_grad()
def test_rows_with_padding_are_those_without(tmp_path: Path) -> None:
    model, folder = exported(tmp_path, "mtla")
    loaded, tokens = same_code(folder), ids(3, 9)
    paddings = (0, 3, 3)
    mask = torch.stack([torch.arange(9) >= padding for padding in paddings]).long()
    logits = loaded(tokens, attention_mask=mask).logits
    for row, padding in enumerate(paddings):
        alone = model(tokens[row : row + 1, padding:])
        torch.testing.assert_close(logits[row : row + 1, padding:], alone, rtol=0, atol=1e-5)
    right = loaded(tokens, attention_mask=mask.flip(1)).logits
    torch.testing.assert_close(right[2, :6], model(tokens[2:, :6])[0], rtol=0, atol=1e-5)
    for beams in (1, 2):
        options: dict[str, Any] = {"max_new_tokens": 4, "num_beams": beams, "pad_token_id": 0}
        together = loaded.generate(tokens, attention_mask=mask, return_dict_in_generate=True, **options)
        for row, padding in enumerate(paddings):
            short = tokens[row : row + 1, padding:]
            alone = loaded.generate(short, attention_mask=torch.ones_like(short), **options)
            assert together.sequences[row, 9:].equal(alone[0, 9 - padding :])
        expected = sum(predicted(model, beams * n, 12 - padding) for n, padding in ((1, 0), (2, 3)))
        assert together.past_key_values.nbytes == expected


def test_what_the_cache_refuses(tmp_path: Path) -> None:
    import transformers

    _, folder = exported(tmp_path, "mtla")
    loaded, tokens = same_code(folder), ids(2, 9)
    holes = torch.tensor([[1, 0, 1]])
    for arguments, message in (
        ({"attention_mask": holes}, "padding must stand on the left or the right of a text"),
        ({"attention_mask": holes, "use_cache": True}, "on the left of a text"),
        ({"attention_mask": torch.tensor([[1, 1, 0]]), "use_cache": True}, "padding_side='left'"),
        ({"attention_mask": torch.zeros(1, 3)}, "at least one token"),
        ({"attention_mask": torch.ones(1, 4)}, r"shape \(1, 4\); expected \(1, 3\)"),
        ({"past_key_values": transformers.DynamicCache()}, "is a DynamicCache; expected an AttnlabCache"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded(tokens[:1, :3], **arguments)
    with pytest.raises(ValueError, match="a text of 28 positions is longer than the 24 of this model"):
        loaded.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, pad_token_id=0)
    cache = loaded(tokens, use_cache=True).past_key_values
    assert isinstance(cache, AttnlabCache)
    with pytest.raises(NotImplementedError, match="crop"):
        cache.crop(1)
    with pytest.raises(ValueError, match="1 rows; the cache was begun with 2"):
        loaded(tokens[:1, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="padding cannot follow a text"):
        loaded(tokens[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 10).tril(8))
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        loaded.generate(tokens[:1], assistant_model=same_code(folder), max_new_tokens=2, pad_token_id=0)


def test_a_model_is_trained_further(tmp_path: Path) -> None:
    model, folder = exported(tmp_path, "tpa")
    loaded, tokens = same_code(folder).train(), ids(2, 9)
    loss = loaded(tokens, labels=tokens).loss
    loss.backward()
    expected = model.loss(tokens[:, :-1], tokens[:, 1:]).mean()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0, atol=1e-5)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in loaded.parameters())


def test_tokenizers_give_the_ids_of_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By AutoTokenizer, which runs no code of a folder; also for texts of a corpus."""
    import transformers

    monkeypatch.setattr("builtins.input", None)  # of a question
    corpus = list(markov.Source().lines("train", 300))
    words, text_words = pieces(), sorted({word for line in corpus for word in line.split()})
    vocabularies: list[tuple[str, str, Vocabulary, str]] = [
        ("mha", "pieces", words, "the sun  of a unknown\nhouse"),
        ("mtla", "learned", BytePairVocabulary(BytePairs().learn(corpus, 400), 400, "before"), corpus[0]),
        ("mha", "bytes", BytePairVocabulary(byte_tokenizer().to_str(), 257, "after"), "the häuser  of"),
        ("mha", "words", WORDS, "w1 w26  nobody w3"),
        ("mtla", "all words", WordVocabulary([*text_words, "<eos>", "<unk>"], "<eos>", "<unk>", "after"), corpus[1]),
    ]
    for attention, folder, vocabulary, text in vocabularies:
        cfg = config(attention)
        language.export(model_of(cfg, vocabulary.size), cfg, vocabulary, record(attention), tmp_path / folder)
        code = {"trust_remote_code": False} if attention == "mtla" else {}
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / folder, **code)
        ids_of_corpus = tokenizer(corpus, add_special_tokens=False, verbose=False).input_ids
        assert ids_of_corpus == [vocabulary.ids(line) for line in corpus]
        assert tokenizer(text, add_special_tokens=False).input_ids == vocabulary.ids(text)
        assert tokenizer(text).input_ids == [vocabulary.end, *vocabulary.ids(text)]
        lines = [*vocabulary.ids(text), vocabulary.end, vocabulary.end, *vocabulary.ids(text), vocabulary.end]
        assert tokenizer.decode(lines) == vocabulary.text(lines)
        batch = tokenizer([text, text.split()[0]], padding=True)
        assert batch.attention_mask[1][0] == 0 and batch.attention_mask[1][-1] == 1
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pieces")
    assert loaded.generation_config.suppress_tokens == list(range(words.num_ids, words.size))
    assert loaded.generation_config.eos_token_id is None
