"""English sentences of a small grammar, each with its one German translation.

There are six sentence patterns over about a hundred English word forms. The German side follows German grammar: the
finite verb is second in statements (the subject follows it where an adverb is in front), first in questions and last
in subordinate clauses; participles, infinitives and separable prefixes end the clause; articles and adjectives agree
in gender, number and case; numbers have the unit before the ten.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
        return [first if first in {"Anna", "Peter"} else first[0].lower() + first[1:], *others]


# --- words ---------------------------------------------------------------------------------------------------------


class Noun(NamedTuple):
    """A noun. `traits`: o = can be opened and closed, m = can be moved, p = can be bought and sold."""

    english: str
    german: str
    plural: str
    gender: str  # m, f, n
    traits: str


NOUNS = tuple(
    Noun(*line.split())
    for line in """
        dog Hund Hunde m mp
        letter Brief Briefe m om
        key Schlüssel Schlüssel m mp
        table Tisch Tische m p
        cat Katze Katzen f mp
        bag Tasche Taschen f omp
        flower Blume Blumen f mp
        lamp Lampe Lampen f mp
        book Buch Bücher n omp
        picture Bild Bilder n mp
        window Fenster Fenster n o
        house Haus Häuser n p
    """.strip().splitlines()
)
PLACES = {"in": ("house", "bag"), "under": ("table", "window", "picture"), "behind": ("house", "table", "lamp")}
PREPOSITIONS = {"in": "in", "under": "unter", "behind": "hinter"}  # here all with the dative
ADJECTIVES = {"old": "alt", "new": "neu", "red": "rot", "small": "klein", "beautiful": "schön"}


class Verb(NamedTuple):
    """A verb with the forms that the sentences need; German ones without the separable `prefix`.

    `trait`: what its object must have. `particle`: what ends the English clause.
    """

    english: str
    third: str
    past: str
    infinitive: str
    german_third: str
    participle: str
    trait: str = ""
    prefix: str = ""
    particle: str = ""


VERBS = tuple(
    Verb(*line.split())
    for line in """
        buy buys bought kaufen kauft gekauft p
        sell sells sold verkaufen verkauft verkauft p
        see sees saw sehen sieht gesehen
        find finds found finden findet gefunden
        open opens opened machen macht gemacht o auf
        close closes closed machen macht gemacht o zu
        bring brings brought bringen bringt gebracht m zurück back
        take takes took nehmen nimmt genommen m mit along
    """.strip().splitlines()
)
GIVING = (
    Verb("give", "gives", "gave", "geben", "gibt", "gegeben", "m"),
    Verb("show", "shows", "showed", "zeigen", "zeigt", "gezeigt", "m"),
)
# Forms by person: 1 (I), 3 (he, Anna), p (we, they).
HAVE = {"1": ("have", "habe"), "3": ("has", "hat"), "p": ("have", "haben")}
KNOW = {"1": ("know", "weiß"), "3": ("knows", "weiß"), "p": ("know", "wissen")}
BE = {"1": ("am", "bin"), "3": ("is", "ist"), "p": ("are", "sind")}
MODALS = {
    "can": {"1": ("can", "kann"), "3": ("can", "kann"), "p": ("can", "können")},
    "must": {"1": ("must", "muss"), "3": ("must", "muss"), "p": ("must", "müssen")},
    "want": {"1": ("want to", "will"), "3": ("wants to", "will"), "p": ("want to", "wollen")},
}
ADVERBS = {"today": "heute", "now": "jetzt", "yesterday": "gestern", "tomorrow": "morgen", "": ""}
FITTING = {"present": ("today", "now"), "past": ("yesterday",)} | dict.fromkeys(MODALS, ("today", "tomorrow"))
HELPERS = {"past": "did", "can": "can"}  # of questions, beside do and does


class Person(NamedTuple):
    """Who acts or receives something; pronouns have no `dative` here. `person` chooses the form of the verb."""

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

# By kind, case and form: the gender, or p for the plural.
ARTICLES = {
    ("definite", "nom"): {"m": "der", "f": "die", "n": "das", "p": "die"},
    ("definite", "acc"): {"m": "den", "f": "die", "n": "das", "p": "die"},
    ("definite", "dat"): {"m": "dem", "f": "der", "n": "dem"},
    ("indefinite", "acc"): {"m": "einen", "f": "eine", "n": "ein"},
}
ENDINGS = {
    ("definite", "nom"): {"m": "e", "f": "e", "n": "e", "p": "en"},
    ("definite", "acc"): {"m": "en", "f": "e", "n": "e", "p": "en"},
    ("definite", "dat"): {"m": "en", "f": "en", "n": "en"},
    ("indefinite", "acc"): {"m": "en", "f": "e", "n": "es"},
    ("number", "acc"): {"p": "e"},
}


def noun_phrase(noun: Noun, kind: str, case: str, adjective: str | None, number: str = "") -> tuple[str, str]:
    """A noun with its article or number, and an adjective, in English and German.

    Args:
        noun: one of NOUNS.
        kind: "definite", "definite plural", "indefinite" or "number".
        case: the German case: "nom", "acc" or "dat".
        adjective: English, a key of ADJECTIVES; None: no adjective.
        number: English; needed with kind "number".
    """
    kind, plural = kind.removesuffix(" plural"), kind.endswith("plural") or kind == "number"
    form = "p" if plural else noun.gender
    before = f"{adjective} " if adjective else ""
    german = f"{ADJECTIVES[adjective]}{ENDINGS[kind, case][form]} " if adjective else ""
    if kind == "number":
        articles = number, (SMALL_NUMBERS | LARGE_NUMBERS)[number]
    else:
        indefinite = "an" if (before + noun.english)[0] in "aeiou" else "a"
        articles = "the" if kind == "definite" else indefinite, ARTICLES[kind, case][form]
    words = (noun.english + "s", noun.plural) if plural else (noun.english, noun.german)
    return f"{articles[0]} {before}{words[0]}", f"{articles[1]} {german}{words[1]}"


def english_verb(subject: Person, verb: Verb, tense: str) -> str:
    """The `verb` with its `subject` in a `tense`: present, past or one of the modals."""
    if tense == "present":
        return verb.third if subject.person == "3" else verb.english
    return verb.past if tense == "past" else f"{MODALS[tense][subject.person][0]} {verb.english}"


def german_verb(subject: Person, verb: Verb, tense: str) -> tuple[str, str]:
    """The finite verb and what ends the clause: separable prefix, participle or infinitive."""
    if tense == "present":
        forms = {"1": verb.infinitive.removesuffix("n"), "3": verb.german_third, "p": verb.infinitive}
        return forms[subject.person], verb.prefix
    if tense == "past":  # the German perfect
        return HAVE[subject.person][1], verb.prefix + verb.participle
    return MODALS[tense][subject.person][1], verb.prefix + verb.infinitive


def _sentence(english: list[str], german: list[str], mark: str = ".") -> Sentence:
    def finish(parts: list[str]) -> str:
        text = " ".join(part for part in parts if part).replace(" ,", ",")
        return text[0].upper() + text[1:] + mark

    return Sentence(finish(english), finish(german))


# --- drawing -------------------------------------------------------------------------------------------------------


class Grammar:
    """Draws sentences; the same state of `rng` gives the same sentences."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def sentences(self) -> Iterator[Sentence]:
        """Sentences of at most `MAX_SPOKEN_WORDS` words, without end and with repetitions."""
        patterns = {
            self._statement: 9,
            self._question: 2,
            self._subordinate: 4,
            self._giving: 2,
            self._possession: 2,
            self._location: 2,
        }
        while True:
            sentence = self.rng.choices(list(patterns), list(patterns.values()))[0]()
            if len(sentence.english_words) <= MAX_SPOKEN_WORDS:
                yield sentence

    def _either(self) -> bool:
        return self.rng.random() < 0.5

    def _subject(self, *others: Person) -> Person:
        """A pronoun, or a person that is not in `others`."""
        return self.rng.choice(PRONOUNS if self._either() else [person for person in PEOPLE if person not in others])

    def _adjective(self) -> str | None:
        return self.rng.choice(list(ADJECTIVES)) if self._either() else None

    def _object(self, verb: Verb) -> tuple[str, str]:
        noun = self.rng.choice([noun for noun in NOUNS if verb.trait in noun.traits])
        kind = self.rng.choices(["definite", "definite plural", "indefinite", "number"], [3, 1, 3, 3])[0]
        number = self.rng.choice(list(SMALL_NUMBERS)) if kind == "number" else ""
        return noun_phrase(noun, kind, "acc", self._adjective(), number)

    def _statement(self) -> Sentence:
        """Yesterday he sold the old house. / Gestern hat er das alte Haus verkauft.

        An adverb at the end of the English sentence precedes the German object.
        """
        subject, verb = self._subject(), self.rng.choice(VERBS)
        tense = self.rng.choice(["present", "past", self.rng.choice(list(MODALS))])
        adverb = self.rng.choice(FITTING[tense]) if self._either() else ""
        thing, german_thing = self._object(verb)
        english = [subject.english, english_verb(subject, verb, tense), thing, verb.particle]
        finite, closing = german_verb(subject, verb, tense)
        german_adverb, doer = ADVERBS[adverb], subject.nominative
        if adverb and self._either():
            return _sentence([adverb, *english], [german_adverb, finite, doer, german_thing, closing])
        return _sentence([*english, adverb], [doer, finite, german_adverb, german_thing, closing])

    def _question(self) -> Sentence:
        """Did she find the key? / Hat sie den Schlüssel gefunden?"""
        verb, subject, tense = self.rng.choice(VERBS), self._subject(), self.rng.choice(["present", "past", "can"])
        thing, german_thing = self._object(verb)
        helper = HELPERS.get(tense, "does" if subject.person == "3" else "do")
        finite, closing = german_verb(subject, verb, tense)
        english = [helper, subject.english, verb.english, thing, verb.particle]
        return _sentence(english, [finite, subject.nominative, german_thing, closing], "?")

    def _subordinate(self) -> Sentence:
        """I know that he takes the dog along. / Ich weiß, dass er den Hund mitnimmt."""
        speaker, verb = self._subject(), self.rng.choice(VERBS)
        link, tense = self.rng.choice(["that", "because"]), self.rng.choice(["present", "past"])
        subject = self._subject(speaker)
        thing, german_thing = self._object(verb)
        knows, happy = KNOW[speaker.person], BE[speaker.person]
        english, german = knows if link == "that" else (f"{happy[0]} happy", f"{happy[1]} glücklich")
        finite, closing = german_verb(subject, verb, tense)
        end = [closing + finite] if tense == "present" else [closing, finite]  # a prefix is one word with its verb
        return _sentence(
            [speaker.english, english, link, subject.english, english_verb(subject, verb, tense), thing, verb.particle],
            [speaker.nominative, german, ",", "dass" if link == "that" else "weil", subject.nominative, german_thing]
            + end,
        )

    def _giving(self) -> Sentence:
        """Peter gave the child a small dog. / Peter hat dem Kind einen kleinen Hund gegeben."""
        subject, verb = self._subject(), self.rng.choice(GIVING)
        receiver = self.rng.choice([person for person in PEOPLE if person != subject])
        tense = self.rng.choice(["present", "past"])
        thing, german_thing = self._object(verb)
        finite, closing = german_verb(subject, verb, tense)
        english = [subject.english, english_verb(subject, verb, tense), receiver.english, thing]
        return _sentence(english, [subject.nominative, finite, receiver.dative, german_thing, closing])

    def _possession(self) -> Sentence:
        """We have twenty-one red flowers. / Wir haben einundzwanzig rote Blumen."""
        number = self.rng.choice(list(SMALL_NUMBERS if self.rng.random() < 0.2 else LARGE_NUMBERS))
        things, german_things = noun_phrase(self.rng.choice(NOUNS), "number", "acc", self._adjective(), number)
        subject = self._subject()
        english, german = HAVE[subject.person]
        return _sentence([subject.english, english, things], [subject.nominative, german, german_things])

    def _location(self) -> Sentence:
        """The red book is in the old bag. / Das rote Buch ist in der alten Tasche."""
        noun = self.rng.choice([noun for noun in NOUNS if "m" in noun.traits])
        preposition = self.rng.choice(list(PLACES))
        place = self.rng.choice([place for place in NOUNS if place.english in PLACES[preposition] and place != noun])
        kind = self.rng.choice(["definite", "definite plural"])
        thing, german_thing = noun_phrase(noun, kind, "nom", self._adjective())
        where, german_where = noun_phrase(place, "definite", "dat", self._adjective())
        english, german = BE["p" if kind.endswith("plural") else "3"]
        german_where = f"{PREPOSITIONS[preposition]} {german_where}"
        if german_where.startswith("in dem "):
            german_where = "im " + german_where.removeprefix("in dem ")
        return _sentence([thing, english, preposition, where], [german_thing, german, german_where])
