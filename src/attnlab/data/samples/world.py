"""A generated world of a few hundred facts: questions in the four published layouts, and its text.

People have a profession, a birth place and an employer; towns lie in countries. The text states every fact, and asks
every question with its answer: a model that was trained on it knows them, and what compression takes away shows.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab.data.corpus import sample_corpus
from attnlab.data.samples import write_lines

PEOPLE = 64
FIRST_NAMES = (
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karin", "Louis",
    "Maria", "Niels", "Olga", "Peter",
)  # fmt: skip
LAST_NAMES = ("Adler", "Berg", "Costa", "Duval", "Evans", "Fischer", "Garcia", "Holm", "Ivanov", "Jensen")
TOWNS = (
    "Ashford", "Brampton", "Carlow", "Dunmore", "Elgin", "Fenwick", "Granby", "Harlow", "Ilford", "Kelso", "Lindale",
    "Marden",
)  # fmt: skip
COUNTRIES = ("Norland", "Sundia", "Westria", "Eastmark")
FIRMS = ("Acme", "Borealis", "Corvus", "Dynamo", "Ember", "Falcon")
WORK = {  # of a biography, in place of the profession's name; the eight professions of Bias in Bios
    "journalist": ("reports for a newspaper", "interviews politicians"),
    "poet": ("has published two books of verse", "reads sonnets on stage"),
    "composer": ("wrote three symphonies", "scores films for an orchestra"),
    "model": ("walks for fashion houses", "has posed for magazine covers"),
    "teacher": ("prepares lessons for a primary school", "marks homework in the evening"),
    "architect": ("draws plans of bridges and houses", "has built a town hall"),
    "painter": ("shows oil portraits in galleries", "mixes colours from minerals"),
    "professor": ("holds a chair at the university", "supervises doctoral students"),
}
PROFESSIONS = (  # the numbers of the published column `profession`
    "accountant", "architect", "attorney", "chiropractor", "comedian", "composer", "dentist", "dietitian", "dj",
    "filmmaker", "interior designer", "journalist", "model", "nurse", "painter", "paralegal", "pastor",
    "personal trainer", "photographer", "physician", "poet", "professor", "psychologist", "rapper",
    "software engineer", "surgeon", "teacher", "yoga teacher",
)  # fmt: skip
TEXT = "world.txt"  # a sentence on each line


class Person(NamedTuple):
    """A person, with a `biography` that does not name the profession."""

    name: str
    profession: str
    town: str
    firm: str
    biography: str


def make_world(seed: int) -> tuple[list[Person], dict[str, str]]:
    """The people of a seed's world, and the country of each town."""
    rng = random.Random(seed)
    names = rng.sample([f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES], PEOPLE)
    countries = {town: COUNTRIES[i % len(COUNTRIES)] for i, town in enumerate(rng.sample(TOWNS, len(TOWNS)))}
    people = []
    for i, name in enumerate(names):
        profession = list(WORK)[i % len(WORK)]
        town, firm, work = rng.choice(TOWNS), rng.choice(FIRMS), rng.choice(WORK[profession])
        biography = f"{name} lives in {rng.choice(TOWNS)} and {work}. The firm {firm} is a client."
        people.append(Person(name, profession, town, firm, biography))
    return people, countries


def write_world(cache_dir: Path, seed: int = 1) -> Path:
    """The directory with the questions in the four published layouts and world.txt, written unless it exists."""
    return sample_corpus(cache_dir, "world", seed, lambda root: _write(root, seed))


def _write(root: Path, seed: int) -> None:
    (people, countries), rng = make_world(seed), random.Random(seed + 1)
    hotpot = [
        {
            "_id": f"{number:04}",
            "question": f"In which country is the town where {person.name} was born?",
            "answer": countries[person.town],
            "type": "bridge",
        }
        for number, person in enumerate(people)
    ]
    rng.shuffle(hotpot)
    half = len(hotpot) // 2
    (root / "hotpot_train_v1.1.json").write_text(json.dumps(hotpot[:half]), encoding="utf-8")
    (root / "hotpot_dev_fullwiki_v1.json").write_text(json.dumps(hotpot[half:]), encoding="utf-8")
    claims = _claims(people, rng)
    third = len(claims) // 3
    write_lines(root / "paper_dev.jsonl", [json.dumps(claim) for claim in claims[:third]])
    write_lines(root / "paper_test.jsonl", [json.dumps(claim) for claim in claims[third:]])
    bios = [{"hard_text": p.biography, "profession": PROFESSIONS.index(p.profession), "gender": 0} for p in people]
    rng.shuffle(bios)
    write_lines(root / "bias_in_bios" / "dev.jsonl", [json.dumps(bio) for bio in bios])
    clozes = [
        cloze
        for person in people
        for cloze in (
            {"inputs": f"{person.name} was born in the town of", "targets": [person.town]},
            {"inputs": f"{person.name} works for the firm", "targets": [person.firm]},
        )
    ]
    clozes += [{"inputs": f"{town} is a town in", "targets": [land]} for town, land in countries.items()]
    rng.shuffle(clozes)
    write_lines(root / "qa_wikidata" / "validation.jsonl", [json.dumps(cloze) for cloze in clozes])
    write_lines(root / TEXT, [f"{cloze['inputs']} {cloze['targets'][0]}." for cloze in clozes])


def _claims(people: list[Person], rng: random.Random) -> list[dict[str, Any]]:
    """Claims in FEVER's fields, as many true as false ones, and some without enough information."""
    claims: list[dict[str, Any]] = []
    for number, person in enumerate(people):
        other = rng.choice([town for town in TOWNS if town != person.town])
        for town, label in ((person.town, "SUPPORTS"), (other, "REFUTES")):
            claims.append({"claim": f"{person.name} was born in the town of {town}.", "label": label})
        if number % 5 == 0:
            claims.append({"claim": f"{person.name} has a red bicycle.", "label": "NOT ENOUGH INFO"})
    rng.shuffle(claims)
    return [{"id": number, "verifiable": "VERIFIABLE", **claim, "evidence": []} for number, claim in enumerate(claims)]


# --- random facts, which a model is asked to recall from a long text ---

TEMPLATES = (  # the words before the answer, in the fact and in the question; short, for windows of few bytes
    "The answer of {name} is",
    "The code for {name} is",
    "The choice of {name} is",
    "The secret of {name} is",
    "The key that {name} has is",
    "The symbol of {name} is",
)
NAMES = (
    "Adele", "Bruno", "Celeste", "Dmitri", "Esther", "Farid", "Greta", "Hugo", "Ines", "Jasper", "Keiko", "Lorenzo",
    "Mabel", "Nikolai", "Oskar", "Petra", "Quentin", "Rosa", "Stefan", "Tamara", "Ursula", "Viktor", "Wanda", "Xenia",
    "Yusuf", "Zofia",
)  # fmt: skip
SAME = " {name} has the same as {other}."  # a fact about two names


def random_fact(draw: np.random.Generator, digits: int, letters: int = 0, template: str = "") -> tuple[str, str]:
    """The beginning of a sentence about a random name, and the random number of `digits` digits at its end.

    letters: of an invented name; 0: one of NAMES. template: one of TEMPLATES; empty: a random one.
    """
    template = template or TEMPLATES[draw.integers(len(TEMPLATES))]
    invented = "".join(chr(ord("a") + letter) for letter in draw.integers(26, size=letters)).capitalize()
    beginning = " " + template.format(name=invented or NAMES[draw.integers(len(NAMES))])
    return beginning, str(draw.integers(10 ** (digits - 1), 10**digits))
