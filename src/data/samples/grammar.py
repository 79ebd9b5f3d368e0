"""English sentences of a small world, each with its one German translation.

Eight sentence patterns over about a hundred English word forms. The German side is built from grammar, not from the
English words: the finite verb stands second in statements (the adverb in front throws the subject behind it), first
in questions and last in subordinate clauses; participles, infinitives and separable prefixes close the clause;
articles and adjectives agree in gender, number and case; numbers put the unit before the ten.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_SPOKEN_WORDS = 8  # "twenty-one" is two


@dataclass(frozen=True)
class Sentence:
    english: str
    german: str

    @property
    def english_words(self) -> list[str]:
        """As spoken: lower case, no punctuation, numbers taken apart."""
        return self.english.lower().replace("-", " ").rstrip(".?").split()

    @property
    def german_words(self) -> list[str]:
        """Without punctuation and the capital of the sentence's start; numbers are one word."""
        first, *others = [word.rstrip(",.?") for word in self.german.split()]
        capital = first in {"Anna", "Peter"}
        return [first if capital else first[0].lower() + first[1:], *others]


# --- words ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noun:
    """`traits`: o = can be opened and closed, m = can be moved about, p = can be bought and sold."""

    english: str
    german: str
    plural: str
    gender: str  # m, f, n
    traits: str


NOUNS = (
    Noun("dog", "Hund", "Hunde", "m", "mp"),
    Noun("letter", "Brief", "Briefe", "m", "om"),
    Noun("key", "Schlüssel", "Schlüssel", "m", "mp"),
    Noun("table", "Tisch", "Tische", "m", "p"),
    Noun("cat", "Katze", "Katzen", "f", "mp"),
    Noun("bag", "Tasche", "Taschen", "f", "omp"),
    Noun("flower", "Blume", "Blumen", "f", "mp"),
    Noun("lamp", "Lampe", "Lampen", "f", "mp"),
    Noun("book", "Buch", "Bücher", "n", "omp"),
    Noun("picture", "Bild", "Bilder", "n", "mp"),
    Noun("window", "Fenster", "Fenster", "n", "o"),
    Noun("house", "Haus", "Häuser", "n", "p"),
)
PLACES = {"in": ("house", "bag"), "under": ("table", "window", "picture"), "behind": ("house", "table", "lamp")}
PREPOSITIONS = {"in": "in", "under": "unter", "behind": "hinter"}  # here all with the dative
ADJECTIVES = {"old": "alt", "new": "neu", "red": "rot", "small": "klein", "beautiful": "schön"}


@dataclass(frozen=True)
class Verb:
    english: str
    third: str
    past: str
    infinitive: str  # without the separable prefix
    german_third: str
    participle: str  # without the separable prefix
    wants: str = ""  # the trait its object must have
    prefix: str = ""  # separable
    particle: str = ""  # closes the English clause, as the prefix does the German one

    def english_present(self, person: str) -> str:
        return self.third if person == "3" else self.english

    def german_present(self, person: str) -> str:
        """Without the prefix; `person` is 1 (I), 3 (he, Anna) or p (we, they)."""
        return {"1": self.infinitive.removesuffix("n"), "3": self.german_third, "p": self.infinitive}[person]


VERBS = (
    Verb("buy", "buys", "bought", "kaufen", "kauft", "gekauft", "p"),
    Verb("sell", "sells", "sold", "verkaufen", "verkauft", "verkauft", "p"),
    Verb("see", "sees", "saw", "sehen", "sieht", "gesehen"),
    Verb("find", "finds", "found", "finden", "findet", "gefunden"),
    Verb("open", "opens", "opened", "machen", "macht", "gemacht", "o", "auf"),
    Verb("close", "closes", "closed", "machen", "macht", "gemacht", "o", "zu"),
    Verb("bring", "brings", "brought", "bringen", "bringt", "gebracht", "m", "zurück", "back"),
    Verb("take", "takes", "took", "nehmen", "nimmt", "genommen", "m", "mit", "along"),
)
GIVING = (
    Verb("give", "gives", "gave", "geben", "gibt", "gegeben", "m"),
    Verb("show", "shows", "showed", "zeigen", "zeigt", "gezeigt", "m"),
)
HAVE = {"1": ("have", "habe"), "3": ("has", "hat"), "p": ("have", "haben")}
KNOW = {"1": ("know", "weiß"), "3": ("knows", "weiß"), "p": ("know", "wissen")}
BE = {"1": ("am", "bin"), "3": ("is", "ist"), "p": ("are", "sind")}
CAN = {"1": ("can", "kann"), "3": ("can", "kann"), "p": ("can", "können")}
MODALS = (
    CAN,
    {"1": ("must", "muss"), "3": ("must", "muss"), "p": ("must", "müssen")},
    {"1": ("want to", "will"), "3": ("wants to", "will"), "p": ("want to", "wollen")},
)


@dataclass(frozen=True)
class Person:
    english: str
    nominative: str
    dative: str  # pronouns never receive anything here
    person: str  # 1, 3, p


PRONOUNS = (
    Person("I", "ich", "", "1"),
    Person("he", "er", "", "3"),
    Person("she", "sie", "", "3"),
    Person("we", "wir", "", "p"),
    Person("they", "sie", "", "p"),
)
PEOPLE = (
    Person("Anna", "Anna", "Anna", "3"),
    Person("Peter", "Peter", "Peter", "3"),
    Person("my brother", "mein Bruder", "meinem Bruder", "3"),
    Person("my sister", "meine Schwester", "meiner Schwester", "3"),
    Person("the woman", "die Frau", "der Frau", "3"),
    Person("the child", "das Kind", "dem Kind", "3"),
)

UNITS = {
    "one": "ein", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf",
    "six": "sechs", "seven": "sieben", "eight": "acht", "nine": "neun",
}  # fmt: skip
TENS = {"twenty": "zwanzig", "thirty": "dreißig", "forty": "vierzig", "fifty": "fünfzig"}
SMALL_NUMBERS = {english: german for english, german in UNITS.items() if english != "one"} | {"ten": "zehn"}
LARGE_NUMBERS = TENS | {
    f"{ten}-{unit}": f"{german_unit}und{german_ten}"
    for ten, german_ten in TENS.items()
    for unit, german_unit in UNITS.items()
}

# --- noun phrases --------------------------------------------------------------------------------------------------

DEFINITE = {
    "nom": {"m": "der", "f": "die", "n": "das", "p": "die"},
    "acc": {"m": "den", "f": "die", "n": "das", "p": "die"},
    "dat": {"m": "dem", "f": "der", "n": "dem"},
}
INDEFINITE = {"m": "einen", "f": "eine", "n": "ein"}  # accusative, the only case that needs it here
ADJECTIVE_ENDINGS = {
    "definite": {
        "nom": {"m": "e", "f": "e", "n": "e", "p": "en"},
        "acc": {"m": "en", "f": "e", "n": "e", "p": "en"},
        "dat": {"m": "en", "f": "en", "n": "en"},
    },
    "indefinite": {"acc": {"m": "en", "f": "e", "n": "es"}},
    "number": {"acc": {"p": "e"}},
}


@dataclass(frozen=True)
class Phrase:
    english: str
    german: str
    plural: bool


def noun_phrase(noun: Noun, kind: str, case: str, adjective: str | None = None, number: str | None = None) -> Phrase:
    """`kind`: definite, definite plural, indefinite or number (which needs `number`); `case`: nom, acc or dat."""
    kind, plural = kind.removesuffix(" plural"), kind.endswith("plural") or kind == "number"
    form = "p" if plural else noun.gender
    if kind == "definite":
        article, german_article = "the", DEFINITE[case][form]
    elif kind == "indefinite":
        article = "an" if (adjective or noun.english)[0] in "aeiou" else "a"
        german_article = INDEFINITE[form]
    else:
        assert number is not None
        article, german_article = number, (SMALL_NUMBERS | LARGE_NUMBERS)[number]
    english, german = [article], [german_article]
    if adjective:
        english.append(adjective)
        german.append(ADJECTIVES[adjective] + ADJECTIVE_ENDINGS[kind][case][form])
    english.append(noun.english + "s" if plural else noun.english)
    german.append(noun.plural if plural else noun.german)
    return Phrase(" ".join(english), " ".join(german), plural)


# --- clauses -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clause:
    """A German clause before its verb has found its place."""

    subject: str
    finite: str
    middle: tuple[str, ...] = ()
    closing: str = ""  # separable prefix, participle or infinitive
    separable: bool = False  # `closing` is a prefix: written as one word with the finite verb where they meet

    def statement(self, front: str = "") -> list[str]:
        opening = [front, self.finite, self.subject] if front else [self.subject, self.finite]
        return [*opening, *self.middle, self.closing]

    def question(self) -> list[str]:
        return [self.finite, self.subject, *self.middle, self.closing]

    def subordinate(self) -> list[str]:
        verb = [self.closing + self.finite] if self.separable else [self.closing, self.finite]
        return [self.subject, *self.middle, *verb]


def present(subject: Person, verb: Verb, *middle: str) -> Clause:
    return Clause(subject.nominative, verb.german_present(subject.person), middle, verb.prefix, bool(verb.prefix))


def perfect(subject: Person, verb: Verb, *middle: str) -> Clause:
    """What English says in the simple past."""
    return Clause(subject.nominative, HAVE[subject.person][1], middle, verb.prefix + verb.participle)


def with_modal(subject: Person, modal: dict[str, tuple[str, str]], verb: Verb, *middle: str) -> Clause:
    return Clause(subject.nominative, modal[subject.person][1], middle, verb.prefix + verb.infinitive)


def _sentence(english: list[str], german: list[str], mark: str = ".") -> Sentence:
    def finish(parts: list[str]) -> str:
        text = " ".join(part for part in parts if part).replace(" ,", ",")
        return text[0].upper() + text[1:] + mark

    return Sentence(finish(english), finish(german))


class Grammar:
    """Draws sentences; the same random state gives the same sentences."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.patterns: dict[Callable[[], Sentence], int] = {  # with their weights
            self.present: 3,
            self.past: 3,
            self.modal: 3,
            self.possession: 2,
            self.giving: 2,
            self.location: 2,
            self.question: 2,
            self.subordinate: 4,
        }

    def sentences(self) -> Iterator[Sentence]:
        """Endless, with repetitions; none has more than `MAX_SPOKEN_WORDS` words."""
        patterns, weights = list(self.patterns), list(self.patterns.values())
        while True:
            sentence = self.rng.choices(patterns, weights)[0]()
            if len(sentence.english_words) <= MAX_SPOKEN_WORDS:
                yield sentence

    # parts

    def _either(self) -> bool:
        return self.rng.random() < 0.5

    def _subject(self) -> Person:
        return self.rng.choice(PRONOUNS if self._either() else PEOPLE)

    def _adjective(self) -> str | None:
        return self.rng.choice(list(ADJECTIVES)) if self._either() else None

    def _object(self, trait: str) -> Phrase:
        noun = self.rng.choice([noun for noun in NOUNS if trait in noun.traits])
        kind = self.rng.choices(["definite", "definite plural", "indefinite", "number"], [3, 1, 3, 3])[0]
        number = self.rng.choice(list(SMALL_NUMBERS)) if kind == "number" else None
        return noun_phrase(noun, kind, "acc", self._adjective(), number)

    def _place(self, adverbs: dict[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
        """An adverb in front, at the end or nowhere: (English, German) of the front and of the other place."""
        none = ("", "")
        if self._either():
            return none, none
        adverb = self.rng.choice(list(adverbs.items()))
        return (adverb, none) if self._either() else (none, adverb)

    # patterns

    def present(self) -> Sentence:
        """Anna opens the book today. / Anna macht heute das Buch auf."""
        subject, verb = self._subject(), self.rng.choice(VERBS)
        thing = self._object(verb.wants)
        front, late = self._place({"today": "heute", "now": "jetzt"})
        clause = present(subject, verb, late[1], thing.german)
        english_verb = verb.english_present(subject.person)
        english = [front[0], subject.english, english_verb, thing.english, verb.particle, late[0]]
        return _sentence(english, clause.statement(front[1]))

    def past(self) -> Sentence:
        """Yesterday he sold the old house. / Gestern hat er das alte Haus verkauft."""
        subject, verb = self._subject(), self.rng.choice(VERBS)
        thing = self._object(verb.wants)
        front, late = self._place({"yesterday": "gestern"})
        clause = perfect(subject, verb, late[1], thing.german)
        english = [front[0], subject.english, verb.past, thing.english, verb.particle, late[0]]
        return _sentence(english, clause.statement(front[1]))

    def modal(self) -> Sentence:
        """Tomorrow we must bring the keys back. / Morgen müssen wir die Schlüssel zurückbringen."""
        subject, verb, modal = self._subject(), self.rng.choice(VERBS), self.rng.choice(MODALS)
        thing = self._object(verb.wants)
        front, late = self._place({"today": "heute", "tomorrow": "morgen"})
        clause = with_modal(subject, modal, verb, late[1], thing.german)
        english_verb = f"{modal[subject.person][0]} {verb.english}"
        english = [front[0], subject.english, english_verb, thing.english, verb.particle, late[0]]
        return _sentence(english, clause.statement(front[1]))

    def possession(self) -> Sentence:
        """We have twenty-one red flowers. / Wir haben einundzwanzig rote Blumen."""
        subject, noun = self._subject(), self.rng.choice(NOUNS)
        number = self.rng.choice(list(LARGE_NUMBERS if self.rng.random() < 0.8 else SMALL_NUMBERS))
        things = noun_phrase(noun, "number", "acc", self._adjective(), number)
        english, german = HAVE[subject.person]
        return _sentence([subject.english, english, things.english], [subject.nominative, german, things.german])

    def giving(self) -> Sentence:
        """Peter gave the child a small dog. / Peter hat dem Kind einen kleinen Hund gegeben."""
        subject, verb = self._subject(), self.rng.choice(GIVING)
        receiver = self.rng.choice([person for person in PEOPLE if person is not subject])
        thing = self._object(verb.wants)
        if self._either():
            english_verb, clause = verb.past, perfect(subject, verb, receiver.dative, thing.german)
        else:
            english_verb = verb.english_present(subject.person)
            clause = present(subject, verb, receiver.dative, thing.german)
        return _sentence([subject.english, english_verb, receiver.english, thing.english], clause.statement())

    def location(self) -> Sentence:
        """The red book is under the old table. / Das rote Buch ist unter dem alten Tisch."""
        noun = self.rng.choice([noun for noun in NOUNS if "m" in noun.traits])
        thing = noun_phrase(noun, self.rng.choice(["definite", "definite plural"]), "nom", self._adjective())
        preposition = self.rng.choice(list(PLACES))
        places = [place for place in NOUNS if place.english in PLACES[preposition] and place is not noun]
        where = noun_phrase(self.rng.choice(places), "definite", "dat", self._adjective())
        german_where = f"{PREPOSITIONS[preposition]} {where.german}"
        if german_where.startswith("in dem "):
            german_where = "im " + german_where.removeprefix("in dem ")
        english, german = BE["p" if thing.plural else "3"]
        return _sentence([thing.english, english, preposition, where.english], [thing.german, german, german_where])

    def question(self) -> Sentence:
        """Did she find the key? / Hat sie den Schlüssel gefunden?"""
        subject, verb = self._subject(), self.rng.choice(VERBS)
        thing = self._object(verb.wants)
        helper = self.rng.choice(["do", "did", "can"])
        if helper == "do":
            helper, clause = "does" if subject.person == "3" else "do", present(subject, verb, thing.german)
        elif helper == "did":
            clause = perfect(subject, verb, thing.german)
        else:
            clause = with_modal(subject, CAN, verb, thing.german)
        return _sentence([helper, subject.english, verb.english, thing.english, verb.particle], clause.question(), "?")

    def subordinate(self) -> Sentence:
        """I know that he takes the dog along. / Ich weiß, dass er den Hund mitnimmt."""
        speaker, subject, verb = self._subject(), self._subject(), self.rng.choice(VERBS)
        while subject is speaker and subject in PEOPLE:  # nobody says "Anna knows that Anna ..."
            subject = self._subject()
        thing = self._object(verb.wants)
        if self._either():
            english_verb, clause = verb.past, perfect(subject, verb, thing.german)
        else:
            english_verb, clause = verb.english_present(subject.person), present(subject, verb, thing.german)
        if self._either():
            english, german = KNOW[speaker.person]
            link, german_link = "that", "dass"
        else:
            (english, german), link, german_link = BE[speaker.person], "because", "weil"
            english, german = f"{english} happy", f"{german} glücklich"
        return _sentence(
            [speaker.english, english, link, subject.english, english_verb, thing.english, verb.particle],
            [speaker.nominative, german, ",", german_link, *clause.subordinate()],
        )
