"""Train the GPT-2 over bytes of the comparison of compressions: 4 layers of 8 heads, learned positions, no rotary keys.

python experiments/comparison/gpt2.py WIKITEXT2 SEED FOLDER
"""

import sys
from pathlib import Path

from attnlab.conversion import sample
from attnlab.data import WikiText
from attnlab.pretrained.decoder import SAMPLE

SIZES = {"model_type": "gpt2", "n_embd": 128, "n_inner": 256, "n_layer": 4, "n_head": 8, "n_positions": 512}
SIZES |= {key: SAMPLE[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
SIZES |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

if __name__ == "__main__":
    root, seed, folder, *steps = sys.argv[1:]
    text = sample._bytes(WikiText(), Path(root))
    model = sample.train(text, int(seed), sizes=SIZES, steps=int(*steps or [800]))
    model.save_pretrained(folder)
    sample.tokenizer().save_pretrained(folder)
