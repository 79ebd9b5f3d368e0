"""Scores of texts in many languages: what is equal has no errors, and each change of a word is one."""

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sacrebleu import utils
from sacrebleu.tokenizers import tokenizer_ja_mecab, tokenizer_spm

from attnlab.errors import ConfigError, DataError
from attnlab.metrics.text import BLEU, ROUGE, WER, IntentAccuracy, TextMetric, WERAsWritten, word_errors
from attnlab.metrics.words import language, language_of, words

TEXTS = {  # a sentence, one of its words, another word; many of them differ in one mark
    "en": ("The old house stands near the small river.", "river", "rivet"),
    "de": ("Für die Bäume am Fluss wäre das schön.", "Für", "Fär"),
    "fr": ("Les élèves étaient déjà à l'école hier matin.", "élèves", "élevés"),
    "es": ("El niño pequeño compró pan esta mañana temprano.", "niño", "nino"),
    "pl": ("Wczoraj rano kupiłem świeży chleb i żółty ser.", "żółty", "żołty"),
    "cs": ("Včera večer jsme šli domů přes starý most.", "domů", "domu"),
    "tr": ("Işık akşamları İstanbul'da çok güzel görünüyor.", "çok", "cok"),
    "vi": ("Hôm qua tôi đã mua rau tươi ở chợ.", "chợ", "chờ"),
    "ru": ("Вчера утром мы ходили на большой рынок.", "рынок", "рывок"),
    "uk": ("Учора її брат їхав додому дуже швидко.", "їхав", "іхав"),
    "el": ("Χθες το πρωί πήγαμε στην παλιά αγορά.", "πήγαμε", "πηγάμε"),
    "ar": ("ذهبت إلى السوق الكبير صباح يوم أمس.", "السوق", "الشوق"),
    "fa": ("دیروز صبح به بازار بزرگ شهر رفتم.", "بازار", "بیزار"),
    "he": ("אתמול בבוקר הלכתי לשוק הגדול בעיר.", "לשוק", "לשון"),
    "ur": ("میں کل صبح بڑے بازار گیا تھا۔", "بازار", "بیزار"),
    "hi": ("मैं कल सुबह बड़े बाज़ार गया था।", "कल", "काल"),
    "mr": ("मी काल सकाळी मोठ्या बाजारात गेलो होतो.", "मी", "मे"),
    "ne": ("म हिजो बिहान ठूलो बजार गएको थिएँ।", "हिजो", "हिजे"),
    "bn": ("আমি গতকাল সকালে বড় বাজারে গিয়েছিলাম।", "সকালে", "সকালি"),
    "pa": ("ਮੈਂ ਕੱਲ੍ਹ ਸਵੇਰੇ ਵੱਡੇ ਬਾਜ਼ਾਰ ਗਿਆ ਸੀ।", "ਸੀ", "ਸੇ"),
    "gu": ("હું ગઈકાલે સવારે મોટા બજારમાં ગયો હતો.", "હતો", "હતી"),
    "ta": ("நான் நேற்று காலை பெரிய சந்தைக்கு சென்றேன்.", "நான்", "நான"),
    "te": ("నేను నిన్న ఉదయం పెద్ద మార్కెట్ వెళ్ళాను.", "నేను", "నేనే"),
    "kn": ("ನಾನು ನಿನ್ನೆ ಬೆಳಿಗ್ಗೆ ದೊಡ್ಡ ಮಾರುಕಟ್ಟೆಗೆ ಹೋದೆ.", "ಹೋದೆ", "ಹೋದ"),
    "ml": ("ഞാൻ ഇന്നലെ രാവിലെ വലിയ ചന്തയിൽ പോയി.", "പോയി", "പോയ"),
    "si": ("මම ඊයේ උදේ ලොකු වෙළඳපොළට ගියා.", "ගියා", "ගිය"),
    "th": ("เมื่อวานนี้ฉันไปซื้อผักสดที่ตลาดใหม่", "ใหม่", "ใหม้"),
    "lo": ("ມື້ວານນີ້ຂ້ອຍໄປຊື້ຜັກສົດຢູ່ຕະຫຼາດໃຫຍ່", "ໃຫຍ່", "ໃຫຍ້"),
    "km": ("ម្សិលមិញខ្ញុំបានទៅទិញបន្លែស្រស់នៅផ្សារធំ", "ធំ", "ធុំ"),
    "my": ("မနေ့ကကျွန်တော်ဈေးသို့သွား၍ဟင်းသီးဟင်းရွက်ဝယ်ခဲ့သည်", "သည်", "သည့်"),
    "bo": ("ཁ་སང་ཞོགས་པར་ང་ཁྲོམ་ལ་ཕྱིན་པ་ཡིན།", "ཡིན", "ཡོན"),
    "zh": ("我昨天早上去市场买了新鲜的蔬菜。", "蔬菜", "水果"),
    "ja": ("私は昨日の朝、市場で新鮮な野菜を買いました。", "ました", "ません"),
    "ko": ("나는 어제 아침에 큰 시장에 가서 채소를 샀다.", "샀다", "산다"),
    "ka": ("გუშინ დილით დიდ ბაზარში წავედი და ბოსტნეული ვიყიდე.", "ბაზარში", "ბაღში"),
    "hy": ("Երեկ առավոտյան ես գնացի մեծ շուկա քաղաքում։", "շուկա", "շունը"),
    "am": ("ትናንት ጠዋት ወደ ትልቁ ገበያ ሄጄ አትክልት ገዛሁ።", "ገዛሁ", "ገዛች"),
    "yi": ("נעכטן אין דער פֿרי בין איך געגאַנגען אין מאַרק.", "מאַרק", "מאָרק"),
}
CHARACTERS = {"th", "lo", "km", "my", "zh", "ja"}


def score(kind: type[TextMetric], hypotheses: Sequence[str], references: Sequence[str], **settings: Any) -> Any:
    metric = kind(len(hypotheses), **settings)
    columns = {"hypotheses": hypotheses, "references": references, "others": [()] * len(hypotheses)}
    metric.update(range(len(hypotheses)), **{name: columns[name] for name in metric.fields})
    return metric.compute()


def bleu(code: str, hypothesis: str, reference: str) -> Any:
    """By characters where the tokenizer of the language is another package."""
    return score(BLEU, [hypothesis], [reference], tokenize="char" if code in ("ja", "ko") else None)


@pytest.mark.parametrize("code", TEXTS)
def test_equal_texts_have_no_errors_and_another_word_is_one(code: str) -> None:
    text, word, other = TEXTS[code]
    changed = text.replace(word, other)
    assert changed != text
    equal = score(WER, [text], [text])
    assert equal["wer"] == 0 and score(WERAsWritten, [text], [text])["wer"] == 0
    errors = score(WER, [changed], [text])
    assert errors["wer"] > 0 and score(WERAsWritten, [changed], [text])["wer"] > 0
    assert equal.get("unit", "words") == ("characters" if code in CHARACTERS else "words")
    if code not in CHARACTERS:
        assert errors["substitutions"] == 1
        assert errors["words"] == len(re.split("[ ་]+" if code == "bo" else " +", text.rstrip("་།")))
    assert score(ROUGE, [text], [text])["rouge2"] == 100 > score(ROUGE, [changed], [text])["rouge1"]
    same, not_same = bleu(code, text, text), bleu(code, changed, text)
    assert same["bleu"] == same["chrf"] == 100 > not_same["bleu"] and not_same["chrf"] < 100


@pytest.mark.parametrize("code", TEXTS)
def test_one_text_in_two_forms_has_no_errors(code: str) -> None:
    """Letters with their marks composed and apart; signs that are not seen."""
    text = TEXTS[code][0]
    apart = unicodedata.normalize("NFD", text)
    unseen = "\u200f" + text.replace(" ", " \u200b")[:3] + "\u00ad\u2060" + text.replace(" ", " \u200b")[3:] + "\ufeff"
    for kind, name, best in ((WER, "wer", 0), (WERAsWritten, "wer", 0)):
        assert score(kind, [apart, text, unseen], [text, apart, text])[name] == best
    assert score(ROUGE, [apart, text, unseen], [text, apart, text], tokenize="unicode")["rouge2"] == 100


APART = {  # one text in two spellings
    "English": ("don\u2019t stop", "don't stop"),
    "French": ("l\u2019eau d\u2019été", "l'eau d'été"),
    "Ukrainian": ("м\u2019ята", "м\u02bcята"),
    "Ukrainian ASCII": ("м\u2019ята", "м'ята"),
    "Uzbek": ("ma\u02bcno", "ma\u2019no"),
    "Italian": ("l\u2019acqua", "l'acqua"),
    "quotation": ("\u2018we don\u2019t\u2019", "we don't"),
    "Arabic": ("مـحـمد", "محمد"),
    "Urdu": ("بــہت", "بہت"),
}


@pytest.mark.parametrize(("text", "other"), APART.values(), ids=APART)
def test_apostrophes_and_tatweel_are_no_errors(text: str, other: str) -> None:
    values = score(WER, [text, other], [other, text])
    assert values["wer"] == 0 and values["words"] == 2 * len(other.split())
    assert (score(WERAsWritten, [text], [other])["wer"] == 0) == ("\u0640" in text)


def test_characters_are_scored_beside_the_words_of_other_scripts() -> None:
    assert words("我用 iPhone 15 拍照。") == ["我", "用", "iphone", "15", "拍", "照"]
    values = score(WER, ["我用iPhone拍了照"], ["我用 iPhone 拍照"])
    assert (values["insertions"], values["characters"], values["unit"], values["wer"]) == (1, 5, "characters", 20)
    assert "characters" in values["signature"] and "words" not in values
    assert "unit" not in score(WER, ["he said 你好 to all"], ["he said 你好 to all"])
    assert score(WERAsWritten, ["我用 iPhone 拍了照"], ["我用 iPhone 拍照"])["words"] == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ISTANBUL İSTANBUL istanbul", "istanbul istanbul istanbul"),
        ("STRASSE Straße STRAẞE", "strasse straße straße"),
        ("ΟΔΟΣ οδός", "οδος οδός"),
        ("می\u200cخواهم", "میخواهم"),
        ("क्\u200dष", "क्ष"),
        ("ab\u00adc\u200d d\ufeff \u200fe\u200e", "abc d e"),
        ("I ❤\ufe0f 1\ufe0f\u20e3 you", "i 1\u20e3 you"),
        ("\u0301 a", "a"),
        ("葛\U000e0100飾", "葛 飾"),
        ("か\u3099 か\u309a", "が か \u309a"),
        ("２０２４年、ＡＢＣ", "２０２４ 年 ａｂｃ"),
        ("人々〇ー", "人 々 〇 ー"),
        ("한국어 문장", "한국어 문장"),
        ("a_b 'tis—so\u3000x", "a_b 'tis so x"),
        ("O\u2019Neill 3,5 €", "o'neill 3 5"),
        ("\u2018don\u2019t stop\u2019", "don't stop"),
        ("dogs\u2019 \u2019tis", "dogs' 'tis"),
        ("«l\u2019eau» d\u2019été", "l'eau d'été"),
        ("м\u02bcята", "м'ята"),
        ("\u2019\u02bc'", "' ' '".replace(" ", "")),
        ("مـحـمد", "محمد"),
        ("שָׁלוֹם\u05beעולם", "שָׁלוֹם עולם"),
    ],
)
def test_what_a_word_is(text: str, expected: str) -> None:
    assert " ".join(words(text, "'_")) == unicodedata.normalize("NFC", expected)


def test_alternations_in_another_script() -> None:
    assert word_errors(["मैं काल गया"], ["मैं { कल / काल } गया"])["wer"] == 0
    assert word_errors(["मैं कला गया"], ["मैं { कल / काल } गया"])["substitutions"] == 1


def test_references_without_words_are_counted_or_refused() -> None:
    values = score(WER, ["a", "", "b"], ["a", "…", "b"])
    assert values["wer"] == 0 and values["warnings"][0].startswith("1 of 3 references have no words")
    assert score(WERAsWritten, ["…"], ["…"])["wer"] == 0
    assert score(ROUGE, ["a", "!"], ["a", "!"])["warnings"][0].startswith(
        "1 of 2 references have no words: they score 0"
    )
    for kind, text in ((WER, "—!"), (WER, "\u200b"), (WER, ""), (WERAsWritten, " "), (ROUGE, "♥"), (ROUGE, "")):
        with pytest.raises(DataError, match="none of 2 references has a word"):
            score(kind, ["a", "b"], [text, text])


def test_words_as_written_are_not_words_where_there_are_no_blanks() -> None:
    for code in TEXTS:
        text = TEXTS[code][0]
        assert ("warnings" in score(WERAsWritten, [text], [text])) == (code in CHARACTERS)


@pytest.mark.slow
def test_words_of_real_english_and_german_are_letters_between_signs(corpora: Path) -> None:
    """But for signs that are not seen, which separate no words."""
    import gzip

    root = corpora / "metric_bleu_wmt17_en_de"
    if not root.is_dir():
        pytest.skip("no metric_bleu_wmt17_en_de here")
    different = 0
    for path in root.glob("*.txt.gz"):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            line = re.sub(r"(?<=\w)\u2019(?=\w)" if "\u2018" in line else "\u2019", "'", line)
            different += words(line, "'_") != re.sub(r"[^\w\s']", " ", line).lower().split()
    assert different == 3  # lines with a soft hyphen


# --- BLEU's tokenizer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", TEXTS)
def test_the_script_tells_the_language_that_has_a_tokenizer(code: str) -> None:
    others = {"zh": "zh", "ja": "ja", "ko": "ko", "bo": "bo"} | {code: code for code in CHARACTERS}
    assert language_of([TEXTS[code][0]]) == others.get(code)


def test_the_tokenizer_follows_the_language() -> None:
    for codes, tokenizer in ((["zh", "zh-TW", "zho_Hans", "yue", "ZH_cn"], "zh"), (["th", "khm_Khmr", "lo"], "char")):
        for code in codes:
            assert BLEU(1, language=code).tokenize == tokenizer
    assert [language(code) for code in ("jpn_Jpan", "kor", "de", "target", None, "")] == ["ja", "ko", *[None] * 4]
    for name in ("de", "tgt", None):  # what is read tells more than the end of a file's name
        values = score(BLEU, [TEXTS["zh"][0]], [TEXTS["zh"][0]], language=name)
        assert (values["tokenize"], values["tokenize_by"]) == ("zh", "the script of the references (zh)")
        assert "tok:zh" in values["signature"] and values["chrf_signature"].startswith(
            "nrefs:1|case:mixed|eff:yes|nc:6"
        )
    values = score(BLEU, ["das Haus ist alt ."], ["das Haus ist alt ."], language="de")
    assert "tok:13a" in values["signature"] and "warnings" not in values
    values = score(BLEU, [TEXTS["zh"][0]], [TEXTS["zh"][0]], tokenize="13a")
    assert values["tokenize_by"] == "task.score.tokenize" and "tokenize=zh" in values["warnings"][0]


def test_a_tokenizer_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    for settings in ({"language": "ja"}, {"tokenize": "ja-mecab"}):
        with pytest.raises(ConfigError, match=re.escape('pip install "sacrebleu[ja]"')) as raised:
            BLEU(1, **settings)
        assert "\n" not in str(raised.value)
    metric = BLEU(1)
    with pytest.raises(ConfigError, match=re.escape('pip install "sacrebleu[ja]"')):
        metric.choose([TEXTS["ja"][0]])

    def offline(url: str) -> None:
        raise OSError(f"no network to {url}")

    for module in (tokenizer_spm, utils):
        monkeypatch.setattr(module, "SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(ConfigError, match="task.score.tokenize=flores200 needs https") as raised:
        BLEU(1, tokenize="flores200")
    assert str(tmp_path / "models") in str(raised.value) and "\n" not in str(raised.value)
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models" / "flores200sacrebleuspm").write_bytes(b"half of it")
    with pytest.raises(ConfigError, match="flores200"):
        BLEU(1, tokenize="flores200")


def test_tokenizers_belong_to_their_metric() -> None:
    for kind, tokenizer in ((BLEU, "unicode"), (ROUGE, "zh"), (WER, "char"), (IntentAccuracy, "13a")):
        with pytest.raises(ConfigError, match=f"task.score.tokenize={tokenizer}: not of the metric {kind.name}"):
            kind(1, tokenize=tokenizer)


# --- ROUGE's tokenizer ---------------------------------------------------------------------------------------------


def test_rouge_drops_letters_only_where_that_is_said() -> None:
    assert score(ROUGE, ["Für"], ["Fär"])["rouge1"] == 0
    values = score(ROUGE, ["Für"], ["Fär"], tokenize="ascii")
    assert values["rouge1"] == 100 and "drops 33.3 % of the references' letters" in values["warnings"][0]
    values = score(ROUGE, ["he walked"], ["he walks"])
    assert (values["tokenize"], values["tokenize_by"], values["rouge1"]) == ("ascii", "the references", 100)
    english = ["a café in town opened its doors to the public", *["on monday after months of work"] * 9]
    assert score(ROUGE, english, english)["tokenize"] == "ascii"
    values = score(ROUGE, ["he walked"], ["he walks"], tokenize="unicode")
    assert values["rouge1"] == 50 and "Unicode words" in values["signature"] and "warnings" not in values


def test_classes_are_equal_in_both_forms_of_a_letter() -> None:
    metric = IntentAccuracy(2)
    apart = unicodedata.normalize("NFD", "café")
    metric.update([0, 1], ["café", apart], [apart, "café"], ["café", "cafe"], ["", ""], ["", ""])
    assert (metric.compute()["accuracy"], metric.compute()["accuracy_constrained"]) == (100, 50)
