"""Writes the texts that eviction.py reads: needles in validation text, and windows of the test text, as ids of bytes.

    python experiments/bytes/needles.py WIKITEXT2 needles.jsonl

It runs in attnlab's environment. The needles are those of experiment=convert/needle_sample with 16 trials.
"""

import json
import sys
import tempfile
from pathlib import Path

from attnlab.data.text.corpora import WikiText
from attnlab.data.text.language_modelling import LanguageModellingData
from attnlab.data.text.vocabulary import PretrainedTokens
from attnlab.tasks.language_modelling.needle import Needle

WINDOW, WINDOWS = 256, 256


def write(root: str, out: Path, cache_dir: str) -> None:
    data = LanguageModellingData(
        root, cache_dir, WikiText(), PretrainedTokens("sample"), 257, WINDOW, update_tokens=WINDOW, batch_size=1
    )
    data.setup("test")
    needle = Needle(lengths=[96, 128, 192, 256], trials=16)
    with out.open("w", encoding="utf-8") as lines:
        for length in needle.ordered:
            for trial in needle.texts(length, data.vocabulary, data.tokens("validation")):
                for depth in needle.depths:
                    context = trial.row(depth)[: len(trial.hay)]
                    row = {"context": context, "question": trial.question, "answer": trial.answer}
                    lines.write(json.dumps({"length": length, "depth": depth} | row) + "\n")
        test = data.tokens("test")
        for start in range(0, WINDOW * WINDOWS, WINDOW):
            lines.write(json.dumps({"window": test.read(start, start + WINDOW).tolist()}) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write(sys.argv[1], Path(sys.argv[2]), folder)
