"""German grammar, checked by hand, and what the grammar promises of everything it draws."""

import random
import re

import pytest

from attnlab.data.samples import grammar
from attnlab.data.samples.grammar import (
    Grammar,
    Person,
    Phrase,
    Sentence,
    Verb,
    giving,
    location,
    noun_phrase,
    possession,
    question,
    statement,
    subordinate,
)

NOUN = {noun.english: noun for noun in grammar.NOUNS}
VERB = {verb.english: verb for verb in (*grammar.VERBS, *grammar.GIVING)}
PERSON = {person.english: person for person in (*grammar.PRONOUNS, *grammar.PEOPLE)}


def v(english: str) -> Verb:
    return VERB[english]


def p(english: str) -> Person:
    return PERSON[english]


def a(noun: str, adjective: str | None = None) -> Phrase:
    return noun_phrase(NOUN[noun], "indefinite", "acc", adjective)


def the(noun: str, adjective: str | None = None, *, plural: bool = False, case: str = "acc") -> Phrase:
    return noun_phrase(NOUN[noun], "definite plural" if plural else "definite", case, adjective)


def some(number: str, noun: str, adjective: str | None = None) -> Phrase:
    return noun_phrase(NOUN[noun], "number", "acc", adjective, number)


@pytest.mark.parametrize(
    ("sentence", "english", "german"),
    [
        # verb second, with and without something in front
        (statement(p("Anna"), v("buy"), "present", the("dog")), "Anna buys the dog.", "Anna kauft den Hund."),
        (
            statement(p("Anna"), v("buy"), "present", the("dog"), "today", True),
            "Today Anna buys the dog.",
            "Heute kauft Anna den Hund.",
        ),
        (
            statement(p("we"), v("see"), "present", a("cat", "small"), "now"),
            "We see a small cat now.",
            "Wir sehen jetzt eine kleine Katze.",
        ),
        # the perfect closes the clause
        (
            statement(p("I"), v("sell"), "past", a("house", "old")),
            "I sold an old house.",
            "Ich habe ein altes Haus verkauft.",
        ),
        (
            statement(p("they"), v("find"), "past", some("two", "key"), "yesterday", True),
            "Yesterday they found two keys.",
            "Gestern haben sie zwei Schlüssel gefunden.",
        ),
        (
            statement(p("my sister"), v("see"), "past", a("picture"), "yesterday"),
            "My sister saw a picture yesterday.",
            "Meine Schwester hat gestern ein Bild gesehen.",
        ),
        # separable verbs in all their places
        (
            statement(p("he"), v("open"), "present", a("letter", "red"), "today"),
            "He opens a red letter today.",
            "Er macht heute einen roten Brief auf.",
        ),
        (
            statement(p("the woman"), v("close"), "past", the("window", plural=True)),
            "The woman closed the windows.",
            "Die Frau hat die Fenster zugemacht.",
        ),
        (
            statement(p("she"), v("take"), "want", the("cat"), "tomorrow", True),
            "Tomorrow she wants to take the cat along.",
            "Morgen will sie die Katze mitnehmen.",
        ),
        (
            statement(p("we"), v("bring"), "must", the("flower", "beautiful", plural=True)),
            "We must bring the beautiful flowers back.",
            "Wir müssen die schönen Blumen zurückbringen.",
        ),
        (
            subordinate(p("I"), "that", p("he"), v("take"), "present", the("dog")),
            "I know that he takes the dog along.",
            "Ich weiß, dass er den Hund mitnimmt.",
        ),
        (
            subordinate(p("they"), "because", p("I"), v("open"), "past", the("bag")),
            "They are happy because I opened the bag.",
            "Sie sind glücklich, weil ich die Tasche aufgemacht habe.",
        ),
        (
            subordinate(p("I"), "because", p("the child"), v("find"), "past", a("key")),
            "I am happy because the child found a key.",
            "Ich bin glücklich, weil das Kind einen Schlüssel gefunden hat.",
        ),
        # questions: verb first
        (
            question(p("Peter"), v("open"), "present", the("book")),
            "Does Peter open the book?",
            "Macht Peter das Buch auf?",
        ),
        (question(p("they"), v("buy"), "present", a("bag")), "Do they buy a bag?", "Kaufen sie eine Tasche?"),
        (question(p("she"), v("find"), "past", the("key")), "Did she find the key?", "Hat sie den Schlüssel gefunden?"),
        (
            question(p("I"), v("bring"), "can", some("ten", "picture", "new")),
            "Can I bring ten new pictures back?",
            "Kann ich zehn neue Bilder zurückbringen?",
        ),
        # receiver in the dative, thing in the accusative
        (
            giving(p("Peter"), v("give"), "past", p("the child"), a("dog", "small")),
            "Peter gave the child a small dog.",
            "Peter hat dem Kind einen kleinen Hund gegeben.",
        ),
        (
            giving(p("the child"), v("show"), "present", p("my brother"), the("lamp", "new")),
            "The child shows my brother the new lamp.",
            "Das Kind zeigt meinem Bruder die neue Lampe.",
        ),
        (
            giving(p("I"), v("give"), "present", p("the woman"), some("three", "book", "old")),
            "I give the woman three old books.",
            "Ich gebe der Frau drei alte Bücher.",
        ),
        # the unit before the ten, in one word
        (
            possession(p("we"), some("twenty-one", "flower", "red")),
            "We have twenty-one red flowers.",
            "Wir haben einundzwanzig rote Blumen.",
        ),
        (
            possession(p("she"), some("thirty-seven", "table")),
            "She has thirty-seven tables.",
            "Sie hat siebenunddreißig Tische.",
        ),
        (
            possession(p("I"), some("fifty", "house", "small")),
            "I have fifty small houses.",
            "Ich habe fünfzig kleine Häuser.",
        ),
        # places in the dative, things in the nominative
        (
            location(the("book", "red", case="nom"), "under", the("table", "old", case="dat")),
            "The red book is under the old table.",
            "Das rote Buch ist unter dem alten Tisch.",
        ),
        (
            location(the("key", "old", case="nom"), "in", the("house", case="dat")),
            "The old key is in the house.",
            "Der alte Schlüssel ist im Haus.",
        ),
        (
            location(the("letter", plural=True, case="nom"), "in", the("bag", "new", case="dat")),
            "The letters are in the new bag.",
            "Die Briefe sind in der neuen Tasche.",
        ),
        (
            location(the("cat", "small", plural=True, case="nom"), "behind", the("lamp", case="dat")),
            "The small cats are behind the lamp.",
            "Die kleinen Katzen sind hinter der Lampe.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else "",
)
def test_pairs_checked_by_hand(sentence: Sentence, english: str, german: str) -> None:
    assert (sentence.english, sentence.german) == (english, german)


def test_numbers() -> None:
    numbers = grammar.SMALL_NUMBERS | grammar.LARGE_NUMBERS
    assert len(numbers) == len(set(numbers.values())) == 9 + 4 * 10
    assert numbers["forty-six"] == "sechsundvierzig"
    assert numbers["thirty-one"] == "einunddreißig"


def test_present_tense() -> None:
    forms = [[v(verb).german_present(person) for person in "13p"] for verb in ("see", "give", "take")]
    assert forms == [["sehe", "sieht", "sehen"], ["gebe", "gibt", "geben"], ["nehme", "nimmt", "nehmen"]]


@pytest.fixture(scope="module")
def drawn() -> list[Sentence]:
    sentences = Grammar(random.Random(5)).sentences()
    return [next(sentences) for _ in range(20000)]


def test_one_translation_for_each_sentence(drawn: list[Sentence]) -> None:
    translations: dict[str, str] = {}
    for sentence in drawn:
        assert translations.setdefault(sentence.english, sentence.german) == sentence.german


def test_form_of_the_text(drawn: list[Sentence]) -> None:
    for sentence in drawn:
        for text in (sentence.english, sentence.german):
            assert re.fullmatch(r"[A-ZÄÖÜ][\wäöüÄÖÜß-]*(,? [\wäöüÄÖÜß-]+)*[.?]", text), text
        assert sentence.english[-1] == sentence.german[-1]
        assert 3 <= len(sentence.english_words) <= 8
    nouns = {noun.german for noun in grammar.NOUNS} | {noun.plural for noun in grammar.NOUNS}
    words = {word for sentence in drawn for word in sentence.german_words}
    assert nouns <= words
    capitals = {word for word in words if word[0].isupper()}
    assert capitals == nouns | {"Anna", "Peter", "Bruder", "Schwester", "Frau", "Kind"}


def test_articles_before_vowels(drawn: list[Sentence]) -> None:
    followers = re.findall(r"\b(an?) (\w+)", " ".join(sentence.english.lower() for sentence in drawn))
    assert {article for article, _ in followers} == {"a", "an"}
    assert all((article == "an") == (word[0] in "aeiou") for article, word in followers)


def test_translation_is_more_than_substitution(drawn: list[Sentence]) -> None:
    """Many sentences end in a verb or prefix that the English one has in its middle."""
    last = {verb.prefix for verb in VERB.values()} | {verb.prefix + verb.participle for verb in VERB.values()}
    last |= {verb.prefix + verb.infinitive for verb in VERB.values()} | {"hat", "haben", "habe"}
    assert sum(sentence.german_words[-1] in last for sentence in drawn) > 0.5 * len(drawn)


def test_same_state_draws_the_same_sentences(drawn: list[Sentence]) -> None:
    again = Grammar(random.Random(5)).sentences()
    assert [next(again) for _ in range(100)] == drawn[:100]
    other = Grammar(random.Random(6)).sentences()
    assert [next(other) for _ in range(100)] != drawn[:100]
