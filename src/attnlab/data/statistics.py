"""What a corpus has: the numbers of the MTLA paper's table 6, counted by the reader."""

from collections.abc import Sequence

from attnlab.data.corpus import Segment, Utterance


def statistics(utterances: Sequence[Utterance]) -> dict[str, float]:
    """The size of a split.  Words are what white space separates.

    Args:
        utterances: of the split, as its reader gives them.

    Returns:
        `utterances`; `hours` of speech, where the inputs are recordings; `source_words` and `target_words`, of all
        transcripts or documents and of all that the decoder writes, and both as means of an utterance
        (`mean_source_words`, `mean_target_words`); `classes`, where texts begin with one.
    """
    count = len(utterances)
    words = {
        "source_words": sum(len(x.source.split()) for x in utterances),
        "target_words": sum(len(x.target.split()) for x in utterances),
    }
    found: dict[str, float] = {"utterances": count}
    segments = [x for x in utterances if isinstance(x, Segment)]
    if segments and len(segments) == count:
        found["hours"] = round(sum(x.seconds for x in segments) / 3600, 4)
    found |= words | {f"mean_{key}": round(value / count, 2) for key, value in words.items()}
    classes = {x.label for x in utterances} - {""}
    return found | ({"classes": len(classes)} if classes else {})
