"""Train the GPT-2 over bytes of the comparison of compressions: 2 layers of 8 heads, learned positions, no rotary keys.

python experiments/comparison/gpt2.py WIKITEXT2 SEED FOLDER
"""

import logging
import sys
from pathlib import Path

import torch
from torch import Tensor

from attnlab.conversion import sample
from attnlab.data import WikiText
from attnlab.pretrained import huggingface
from attnlab.pretrained.decoder import SAMPLE

ROWS, WINDOW, STEPS, LR = 64, 32, 1500, 3e-3
SIZES = {"model_type": "gpt2", "n_embd": 128, "n_inner": 256, "n_layer": 2, "n_head": 8, "n_positions": WINDOW}
SIZES |= {key: SAMPLE[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
SIZES |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SIZES |= {"initializer_range": 0.08}  # about 1 / sqrt(128): with 0.02, made for a width of 768, it learns slowly

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    root, seed, folder = sys.argv[1:]
    text = sample._bytes(WikiText(), Path(root))
    generator = torch.Generator().manual_seed(int(seed))
    torch.manual_seed(int(seed))
    model = huggingface.create("gpt2", SIZES)

    def rows(step: int) -> tuple[Tensor, None]:
        starts = torch.randint(len(text) - WINDOW - 1, (ROWS,), generator=generator)
        return torch.stack([text[start : start + WINDOW + 1] for start in starts.tolist()]).long(), None

    sample._update(model, rows, STEPS, LR)
    model.save_pretrained(folder)  # type: ignore[operator]
    sample.tokenizer().save_pretrained(folder)
