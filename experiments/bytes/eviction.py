"""Evicts keys and values with kvpress, on the texts of needles.py: recall, perplexity and bytes of the cache.

    python3 -m venv kvpress-env && kvpress-env/bin/pip install torch==2.13.0 kvpress==0.5.5 transformers==5.2.0
    OMP_NUM_THREADS=1 kvpress-env/bin/python experiments/bytes/eviction.py needles.jsonl kvpress.csv FOLDER...

FOLDER is a Hugging Face folder of each seed, whose name ends with the seed. A press reads the text before the question
and compresses its cache. Question and answer are then read through that cache, one id at a time at their true
positions. An answer is right if each of its ids is the most probable one. Of a window of the test text a press reads
the first half. The second half is scored without its first id, which is predicted before the cache is compressed.

KVzip and AdaKV keep another number of pairs in each head. kvpress holds all of their pairs and masks the evicted ones:
`Bytes held` are those tensors with kvpress's indices. `Bytes counted` are the pairs that are not masked, and an int32
for each head and layer, as a cache with heads of several lengths needs. For the other presses both are the same.
"""

import csv
import json
import sys
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from math import exp
from pathlib import Path
from statistics import mean

import torch
from kvpress import AdaKVPress, BasePress, ExpectedAttentionPress, KVzipPress, StreamingLLMPress
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

LEFT = (0.75, 0.5, 0.375, 0.25, 0.125, 0.0625)  # share of the pairs
EXPECTED = {"n_future_positions": 128}  # the default, 512, is more positions than the model has seen
PRESSES = {
    "KVzip": KVzipPress,
    "KVzip, chunks of 64": partial(KVzipPress, chunk_size=64),
    "ExpectedAttention": ExpectedAttentionPress,
    "ExpectedAttention, 128 positions": partial(ExpectedAttentionPress, **EXPECTED),
    "AdaKV of ExpectedAttention, 128 positions": lambda compression_ratio: AdaKVPress(
        ExpectedAttentionPress(compression_ratio, epsilon=1e-2, **EXPECTED)
    ),
    "StreamingLLM": StreamingLLMPress,
}


@torch.no_grad()
def read(
    model: PreTrainedModel, press: BasePress | None, contexts: Tensor, rest: Tensor
) -> tuple[Tensor, dict[str, int]]:
    """Compress the caches of contexts, and read the rest of each through its own.

    Args:
        contexts: (n, c) ids.
        rest: (n, r) ids that follow them.

    Returns:
        Logits of the rest without its first id, (n, r - 1, vocabulary), and the bytes `held` and `counted`.
    """
    attentions = [layer.self_attn for layer in model.model.layers]
    pairs, masks = [[] for _ in attentions], [[] for _ in attentions]
    size = 1 if isinstance(press, KVzipPress) else len(contexts)  # KVzip reads one text at a time
    for first in range(0, len(contexts), size):
        cache = DynamicCache()
        with press(model) if press else nullcontext():
            model.model(input_ids=contexts[first : first + size], past_key_values=cache)
        for i, attention in enumerate(attentions):
            pairs[i].append((cache.layers[i].keys, cache.layers[i].values))
            if attention.masked_key_indices is not None:  # kvpress's place for the evicted pairs: text, head, position
                text, head, position = attention.masked_key_indices
                masks[i].append((text + first, head, position))

    cache, held, counted = DynamicCache(), 0, 0
    for i, attention in enumerate(attentions):
        keys, values = (torch.cat(tensors) for tensors in zip(*pairs[i], strict=True))
        cache.update(keys, values, i)
        size = keys.nbytes + values.nbytes
        held, counted = held + size, counted + size
        if masks[i]:
            mask = attention.masked_key_indices = tuple(torch.cat(parts) for parts in zip(*masks[i], strict=True))
            held += sum(part.nbytes for part in mask)
            counted += 4 * keys.shape[0] * keys.shape[1] - len(mask[0]) * size // keys[..., 0].numel()

    steps = []
    for i in range(rest.shape[1] - 1):
        position = torch.full((len(rest), 1), contexts.shape[1] + i)
        steps.append(model(rest[:, i : i + 1], past_key_values=cache, position_ids=position).logits[:, -1])
    return torch.stack(steps, 1), {"held": held, "counted": counted}


def measure(model: PreTrainedModel, press: BasePress | None, rows: list[dict]) -> tuple[dict, float, dict[str, int]]:
    """Recall by length in percent, perplexity of the second halves, and the bytes of the caches of all texts."""
    groups, sizes, right = defaultdict(list), {"held": 0, "counted": 0}, defaultdict(list)
    for row in rows:
        if "window" in row:
            half = len(row["window"]) // 2
            groups[half, None].append((row["window"][:half], row["window"][half:]))
        else:
            rest = row["question"] + row["answer"]
            groups[len(row["context"]), row["length"], len(row["answer"])].append((row["context"], rest))
    for (_, *needle), texts in groups.items():
        contexts, rest = (torch.tensor(part) for part in zip(*texts, strict=True))
        logits, part = read(model, press, contexts, rest)
        sizes = {name: sizes[name] + part[name] for name in sizes}
        if needle == [None]:
            nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), rest[:, 1:].flatten()).item()
        else:
            length, scored = needle
            right[length] += (logits[:, -scored:].argmax(-1) == rest[:, -scored:]).all(1).tolist()
    recall = {f"Recall % of length {length}": 100 * mean(each) for length, each in sorted(right.items())}
    return {"Recall %": 100 * mean(sum(right.values(), []))} | recall, exp(nats), sizes


def main(texts: Path, out: Path, folders: list[Path]) -> None:
    rows = [json.loads(line) for line in texts.read_text(encoding="utf-8").splitlines()]
    versions = {f"{name} version": version(name) for name in ("kvpress", "transformers")}
    trials = [("none", None)] + [(name, press(1 - left)) for name, press in PRESSES.items() for left in LEFT]
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = None
        for folder in folders:
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            for name, press in trials:
                recall, perplexity, sizes = measure(model, press, rows)
                if press is None:
                    original, full = perplexity, sizes
                line = {"Press": name, "Seed": folder.name[-1]}
                line |= {f"Bytes {which} %": round(100 * sizes[which] / full[which], 2) for which in sizes}
                line |= {key: round(percent, 2) for key, percent in recall.items()}
                line["Perplexity of the second half"] = round(perplexity, 4)
                line["Original perplexity of the second half"] = round(original, 4)
                line |= versions
                if writer is None:
                    writer = csv.DictWriter(file, line, lineterminator="\n")
                    writer.writeheader()
                writer.writerow(line)
                file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
