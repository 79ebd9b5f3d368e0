"""German grammar, checked by hand, and what the grammar promises of everything it draws."""

import random

import pytest

from attnlab.data.samples.grammar import Grammar, Sentence

BY_HAND = {  # among the sentences that are drawn: each pattern, tense and kind of phrase
    "My sister saw a picture yesterday.": "Meine Schwester hat gestern ein Bild gesehen.",
    "The old key is in the house.": "Der alte Schlüssel ist im Haus.",
    "The small cats are behind the lamp.": "Die kleinen Katzen sind hinter der Lampe.",
    "The woman wants to buy the keys.": "Die Frau will die Schlüssel kaufen.",
    "My brother must take a flower along.": "Mein Bruder muss eine Blume mitnehmen.",
    "She knows that she brings the dogs back.": "Sie weiß, dass sie die Hunde zurückbringt.",
    "Does he find a window?": "Findet er ein Fenster?",
    "Did my sister take a red key along?": "Hat meine Schwester einen roten Schlüssel mitgenommen?",
    "I know that Peter takes ten dogs along.": "Ich weiß, dass Peter zehn Hunde mitnimmt.",
    "Anna is happy because she opened a window.": "Anna ist glücklich, weil sie ein Fenster aufgemacht hat.",
    "Anna gave the woman ten red lamps.": "Anna hat der Frau zehn rote Lampen gegeben.",
    "She shows the child the dog.": "Sie zeigt dem Kind den Hund.",
    "The old letters are in the house.": "Die alten Briefe sind im Haus.",
    "The red books are under the new window.": "Die roten Bücher sind unter dem neuen Fenster.",
    "She has forty-one houses.": "Sie hat einundvierzig Häuser.",
    "Yesterday my sister bought the new book.": "Gestern hat meine Schwester das neue Buch gekauft.",
    "Today he buys the lamp.": "Heute kauft er die Lampe.",
    "Can I buy three new flowers?": "Kann ich drei neue Blumen kaufen?",
    "Today she must bring an old letter back.": "Heute muss sie einen alten Brief zurückbringen.",
}


@pytest.fixture(scope="module")
def drawn() -> list[Sentence]:
    sentences = Grammar(random.Random(5)).sentences()
    return [next(sentences) for _ in range(20000)]


def test_pairs_checked_by_hand(drawn: list[Sentence]) -> None:
    translations = {sentence.english: sentence.german for sentence in drawn}
    assert {english: translations[english] for english in BY_HAND} == BY_HAND
