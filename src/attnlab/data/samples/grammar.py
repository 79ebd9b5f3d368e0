"""English sentences of a small grammar, each with its one German translation.

There are six sentence patterns over about a hundred English word forms. The German side follows German grammar: the
finite verb is second in statements (the subject follows it where an adverb is in front), first in questions and last
in subordinate clauses; participles, infinitives and separable prefixes end the clause; articles and adjectives agree
in gender, number and case; numbers have the unit before the ten.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_SPOKEN_WORDS = 8  # "twenty-one" counts as two


@dataclass(frozen=True)
class Sentence:
    """A sentence in both languages, `english` and `german`, with punctuation."""

    english: str
    german: str

    @property
    def english_words(self) -> list[str]:
        """As spoken: lower case, without punctuation, "twenty-one" as two words."""
        return self.english.lower().replace("-", " ").rstrip(".?").split()

    @property
    def german_words(self) -> list[str]:
        """Without punctuation and without the capital at the beginning; numbers are one word."""
        first, *others = [word.rstrip(",.?") for word in self.german.split()]
        capital = first in {"Anna", "Peter"}
        return [first if capital else first[0].lower() + first[1:], *others]


# --- words ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noun:
    """A noun: `english` and `german`, both singular, the German `plural`, and its `gender`: m, f or n.

    `traits`: o = can be opened and closed, m = can be moved, p = can be bought and sold.
    """

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
    """A verb with the forms that the sentences need; German ones without the separable prefix.

    Args:
        english: infinitive.
        third, past: English third person singular and past tense.
        infinitive, german_third, participle: the German forms.
        object_trait: the trait that its object must have; empty: any object.
        prefix: German separable prefix, or empty.
        particle: what ends the English clause, or empty.
    """

    english: str
    third: str
    past: str
    infinitive: str
    german_third: str
    participle: str
    object_trait: str = ""
    prefix: str = ""
    particle: str = ""

    def german_present(self, person: str) -> str:
        """The present tense without the prefix; `person` is 1 (I), 3 (he, Anna) or p (we, they)."""
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
HAPPY = ("happy", "glücklich")
MODALS = {
    "can": {"1": ("can", "kann"), "3": ("can", "kann"), "p": ("can", "können")},
    "must": {"1": ("must", "muss"), "3": ("must", "muss"), "p": ("must", "müssen")},
    "want": {"1": ("want to", "will"), "3": ("wants to", "will"), "p": ("want to", "wollen")},
}
ADVERBS = {"today": "heute", "now": "jetzt", "yesterday": "gestern", "tomorrow": "morgen"}
FITTING = {"present": ("today", "now"), "past": ("yesterday",)} | dict.fromkeys(MODALS, ("today", "tomorrow"))
LINKS = {"that": "dass", "because": "weil"}


@dataclass(frozen=True)
class Person:
    """Who acts or is given something: `english`, and German `nominative` and `dative` (empty for pronouns).

    `person`: 1 (I), 3 (he, Anna) or p (we, they), which chooses the form of the verb.
    """

    english: str
    nominative: str
    dative: str
    person: str


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
    """A noun with article and adjective: `english`, `german` in the case asked for, whether it is `plural`."""

    english: str
    german: str
    plural: bool


def noun_phrase(noun: Noun, kind: str, case: str, adjective: str | None = None, number: str | None = None) -> Phrase:
    """A noun with its article or number, and an adjective.

    Args:
        noun: the noun.
        kind: "definite", "definite plural", "indefinite" or "number".
        case: the German case: "nom", "acc" or "dat".
        adjective: English, a key of ADJECTIVES; None: no adjective.
        number: English, a number word; needed with kind "number".
    """
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
    """The parts of a German clause; the methods put them in order.

    Args:
        subject, finite, middle: the subject, the finite verb, and objects and adverbs.
        closing: separable prefix, participle or infinitive.
        separable: whether `closing` is a prefix, which is one word with the finite verb where they meet.
    """

    subject: str
    finite: str
    middle: tuple[str, ...] = ()
    closing: str = ""
    separable: bool = False

    def statement(self, front: str = "") -> list[str]:
        """The finite verb second, after `front` or the subject."""
        opening = [front, self.finite, self.subject] if front else [self.subject, self.finite]
        return [*opening, *self.middle, self.closing]

    def question(self) -> list[str]:
        """The finite verb first."""
        return [self.finite, self.subject, *self.middle, self.closing]

    def subordinate(self) -> list[str]:
        """The finite verb last."""
        verb = [self.closing + self.finite] if self.separable else [self.closing, self.finite]
        return [self.subject, *self.middle, *verb]


def english_verb(subject: Person, verb: Verb, tense: str) -> str:
    """The `verb` with its `subject` in a `tense`: present, past or one of the modals."""
    if tense == "present":
        return verb.third if subject.person == "3" else verb.english
    return verb.past if tense == "past" else f"{MODALS[tense][subject.person][0]} {verb.english}"


def german_clause(subject: Person, verb: Verb, tense: str, *middle: str) -> Clause:
    """The clause of `subject`, `verb` and `middle` (objects, adverbs).

    `tense`: present, past (the German perfect) or one of the modals.
    """
    if tense == "present":
        return Clause(subject.nominative, verb.german_present(subject.person), middle, verb.prefix, bool(verb.prefix))
    if tense == "past":
        return Clause(subject.nominative, HAVE[subject.person][1], middle, verb.prefix + verb.participle)
    return Clause(subject.nominative, MODALS[tense][subject.person][1], middle, verb.prefix + verb.infinitive)


# --- sentences -----------------------------------------------------------------------------------------------------


def _sentence(english: list[str], german: list[str], mark: str = ".") -> Sentence:
    def finish(parts: list[str]) -> str:
        text = " ".join(part for part in parts if part).replace(" ,", ",")
        return text[0].upper() + text[1:] + mark

    return Sentence(finish(english), finish(german))


def statement(
    subject: Person, verb: Verb, tense: str, thing: Phrase, adverb: str = "", in_front: bool = False
) -> Sentence:
    """Yesterday he sold the old house. / Gestern hat er das alte Haus verkauft.

    An adverb at the end of the English sentence precedes the German object.

    Args:
        subject: who acts.
        verb: what is done.
        tense: present, past or one of the modals.
        thing: the object, in the accusative.
        adverb: English, a key of ADVERBS; empty: none.
        in_front: whether the adverb begins the sentence.
    """
    german_adverb = ADVERBS[adverb] if adverb else ""
    english = [subject.english, english_verb(subject, verb, tense), thing.english, verb.particle]
    if in_front:
        german = german_clause(subject, verb, tense, thing.german).statement(german_adverb)
        return _sentence([adverb, *english], german)
    return _sentence([*english, adverb], german_clause(subject, verb, tense, german_adverb, thing.german).statement())


def question(subject: Person, verb: Verb, tense: str, thing: Phrase) -> Sentence:
    """Did she find the key? / Hat sie den Schlüssel gefunden?  `tense`: present, past or can.

    `subject`, `verb`, `thing`: as of :func:`statement`.
    """
    helper = {"present": "does" if subject.person == "3" else "do", "past": "did", "can": "can"}[tense]
    german = german_clause(subject, verb, tense, thing.german).question()
    return _sentence([helper, subject.english, verb.english, thing.english, verb.particle], german, "?")


def subordinate(speaker: Person, link: str, subject: Person, verb: Verb, tense: str, thing: Phrase) -> Sentence:
    """I know that he takes the dog along. / Ich weiß, dass er den Hund mitnimmt.  `link`: that or because.

    `speaker`: who knows or is happy; `subject`, `verb`, `tense`, `thing`: as of :func:`statement`.
    """
    english, german = KNOW[speaker.person]
    if link == "because":
        english, german = (f"{be} {happy}" for be, happy in zip(BE[speaker.person], HAPPY, strict=True))
    verb_phrase = [english_verb(subject, verb, tense), thing.english, verb.particle]
    clause = german_clause(subject, verb, tense, thing.german).subordinate()
    return _sentence(
        [speaker.english, english, link, subject.english, *verb_phrase],
        [speaker.nominative, german, ",", LINKS[link], *clause],
    )


def giving(subject: Person, verb: Verb, tense: str, receiver: Person, thing: Phrase) -> Sentence:
    """Peter gave the child a small dog. / Peter hat dem Kind einen kleinen Hund gegeben.

    `receiver`: who is given something; `subject`, `verb`, `tense`, `thing`: as of :func:`statement`.
    """
    english = [subject.english, english_verb(subject, verb, tense), receiver.english, thing.english]
    return _sentence(english, german_clause(subject, verb, tense, receiver.dative, thing.german).statement())


def possession(subject: Person, things: Phrase) -> Sentence:
    """We have twenty-one red flowers (`subject`, `things`). / Wir haben einundzwanzig rote Blumen."""
    english, german = HAVE[subject.person]
    return _sentence([subject.english, english, things.english], [subject.nominative, german, things.german])


def location(thing: Phrase, preposition: str, place: Phrase) -> Sentence:
    """The red book is in the old bag. / Das rote Buch ist in der alten Tasche.

    `thing` in the nominative, `preposition` in English, `place` in the dative.
    """
    english, german = BE["p" if thing.plural else "3"]
    where = f"{PREPOSITIONS[preposition]} {place.german}"
    if where.startswith("in dem "):
        where = "im " + where.removeprefix("in dem ")
    return _sentence([thing.english, english, preposition, place.english], [thing.german, german, where])


# --- drawing -------------------------------------------------------------------------------------------------------


class Grammar:
    """Draws sentences.

    Args:
        rng: the same state gives the same sentences.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.patterns: dict[Callable[[], Sentence], int] = {  # with their weights
            self._statement: 9,
            self._question: 2,
            self._subordinate: 4,
            self._giving: 2,
            self._possession: 2,
            self._location: 2,
        }

    def sentences(self) -> Iterator[Sentence]:
        """Sentences of at most `MAX_SPOKEN_WORDS` words, without end and with repetitions."""
        patterns, weights = list(self.patterns), list(self.patterns.values())
        while True:
            sentence = self.rng.choices(patterns, weights)[0]()
            if len(sentence.english_words) <= MAX_SPOKEN_WORDS:
                yield sentence

    def _either(self) -> bool:
        return self.rng.random() < 0.5

    def _subject(self, *others: Person) -> Person:
        """A pronoun, or a person that is not in `others`."""
        return self.rng.choice(PRONOUNS if self._either() else [person for person in PEOPLE if person not in others])

    def _adjective(self) -> str | None:
        return self.rng.choice(list(ADJECTIVES)) if self._either() else None

    def _object(self, verb: Verb) -> Phrase:
        noun = self.rng.choice([noun for noun in NOUNS if verb.object_trait in noun.traits])
        kind = self.rng.choices(["definite", "definite plural", "indefinite", "number"], [3, 1, 3, 3])[0]
        number = self.rng.choice(list(SMALL_NUMBERS)) if kind == "number" else None
        return noun_phrase(noun, kind, "acc", self._adjective(), number)

    def _statement(self) -> Sentence:
        subject, verb = self._subject(), self.rng.choice(VERBS)
        tense = self.rng.choice(["present", "past", self.rng.choice(list(MODALS))])
        adverb = self.rng.choice(FITTING[tense]) if self._either() else ""
        return statement(subject, verb, tense, self._object(verb), adverb, bool(adverb) and self._either())

    def _question(self) -> Sentence:
        verb = self.rng.choice(VERBS)
        return question(self._subject(), verb, self.rng.choice(["present", "past", "can"]), self._object(verb))

    def _subordinate(self) -> Sentence:
        speaker, verb = self._subject(), self.rng.choice(VERBS)
        link, tense = self.rng.choice(list(LINKS)), self.rng.choice(["present", "past"])
        return subordinate(speaker, link, self._subject(speaker), verb, tense, self._object(verb))

    def _giving(self) -> Sentence:
        subject, verb = self._subject(), self.rng.choice(GIVING)
        receiver = self.rng.choice([person for person in PEOPLE if person is not subject])
        return giving(subject, verb, self.rng.choice(["present", "past"]), receiver, self._object(verb))

    def _possession(self) -> Sentence:
        number = self.rng.choice(list(SMALL_NUMBERS if self.rng.random() < 0.2 else LARGE_NUMBERS))
        things = noun_phrase(self.rng.choice(NOUNS), "number", "acc", self._adjective(), number)
        return possession(self._subject(), things)

    def _location(self) -> Sentence:
        noun = self.rng.choice([noun for noun in NOUNS if "m" in noun.traits])
        preposition = self.rng.choice(list(PLACES))
        place = self.rng.choice([place for place in NOUNS if place.english in PLACES[preposition] and place != noun])
        kind = self.rng.choice(["definite", "definite plural"])
        thing = noun_phrase(noun, kind, "nom", self._adjective())
        return location(thing, preposition, noun_phrase(place, "definite", "dat", self._adjective()))
