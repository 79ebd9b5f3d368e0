"""NIST's alternations in a reference, `{ a / b }` (@: nothing), also nested: the reading with the fewest errors.

A reference is a graph whose edges hold words, and each path through it is a reading.  Its errors are the costs of edit
distance along the edges, so that time grows with the words of all alternatives and not with the number of readings.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.int64]  # errors against the first i words of a hypothesis, for each i
Graph = list[list[tuple[int, list[str]]]]  # of each node, the later nodes that follow it, and the words before them


def closest_reading(reference: str, hypothesis: str, normalise: Callable[[str], str]) -> str:
    """The normalised reading of `reference` with the fewest errors against `hypothesis`; the first of equals.

    Args:
        hypothesis: normalised, with its words between spaces.
        normalise: what is done to a text of the reference before words are compared.
    """
    graph = _graph(reference, normalise) if "{" in reference else None
    if graph is None:
        return normalise(reference)
    spoken = hypothesis.split()
    numbers = {word: number for number, word in enumerate(dict.fromkeys(spoken))}
    heard = np.asarray([numbers[word] for word in spoken], dtype=np.int64)
    start, last = np.arange(len(spoken) + 1), len(graph) - 1

    def through(costs: Costs, words: Sequence[str], heard: npt.NDArray[np.int64]) -> Costs:
        for word in words:
            costs = _with_word(costs, heard != numbers.get(word, -1))
        return costs

    after = {last: start}  # of each node: the errors of what follows it, against the last i words
    for node in reversed(range(last)):
        ways = [through(after[end], words[::-1], heard[::-1]) for end, words in graph[node]]
        after[node] = np.minimum.reduce(ways)
    fewest, node, before = after[0][-1], 0, start
    reading: list[str] = []
    while node != last:
        for end, words in graph[node]:
            costs = through(before, words, heard)
            if (costs + after[end][::-1]).min() == fewest:
                break
        reading += words
        node, before = end, costs
    return " ".join(reading)


def _graph(reference: str, normalise: Callable[[str], str]) -> Graph | None:
    """The readings from node 0 to the last node.  None: braces have another meaning in this reference."""
    graph: Graph = [[]]
    groups: list[tuple[int, list[int]]] = []  # those not closed: where they begin, and where their alternatives end

    def step(begin: int, words: list[str]) -> None:
        graph[begin].append((len(graph), words))
        graph.append([])

    for part in re.split(r"([{}])", reference):
        if part == "{":
            groups.append((len(graph) - 1, []))
            step(len(graph) - 1, [])
        elif part == "}":
            if not groups or not groups[-1][1]:
                return None
            _, ends = groups.pop()
            step(len(graph) - 1, [])
            for end in ends:
                graph[end].append((len(graph) - 1, []))
        else:
            for i, text in enumerate(part.replace("@", " ").split("/") if groups else [part]):
                if i:
                    groups[-1][1].append(len(graph) - 1)
                    step(groups[-1][0], [])
                step(len(graph) - 1, normalise(text).split())
    return None if groups else graph


def _with_word(costs: Costs, differs: npt.NDArray[np.bool_]) -> Costs:
    """The costs after one more word of the reference, which `differs` from each word of the hypothesis or not."""
    places = np.arange(len(costs))
    grown = costs + 1
    grown[1:] = np.minimum(grown[1:], costs[:-1] + differs)
    inserted: Costs = np.minimum.accumulate(grown - places) + places
    return inserted
