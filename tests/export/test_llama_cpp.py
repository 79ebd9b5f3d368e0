"""llama.cpp computes what transformers does from the same folder, converted by llama.cpp's own script.

ATTNLAB_LLAMA_CPP names its sources, ATTNLAB_LLAMA_CPP_PYTHON a Python that has llama_cpp of the same version.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.attention import MLA
from attnlab.export import deepseek, language
from attnlab.models import T6
from tests.command import environment
from tests.export import trained

SOURCES, PYTHON = os.environ.get("ATTNLAB_LLAMA_CPP", ""), os.environ.get("ATTNLAB_LLAMA_CPP_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (SOURCES and PYTHON), reason="needs llama.cpp")]
TEXTS = ["the house of the rising sun", "it's  äöü 123,\n\n they"]
CELLS = 16384  # of llama.cpp's cache, so many that its log is exact
CONVERT = """
import sys
import attnlab.torchvision_schemas
sys.path.insert(0, sys.argv.pop(1))
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""
DECODE = """
import json, sys
from llama_cpp import Llama
job = json.load(sys.stdin)
model = Llama(**job["options"], logits_all=True, n_threads=1, type_k=0, type_v=0, flash_attn=False)
tokens, logits = [], []
for prompt in job["prompts"]:
    model.reset()
    model.eval(prompt)
    for _ in range(40):
        model.eval([int(model.scores[model.n_tokens - 1].argmax())])
    tokens.append(model.input_ids[: model.n_tokens].tolist())
    logits.append(model.scores[: model.n_tokens].tolist())
texts = [model.tokenize(text.encode()) for text in job["texts"]] + [model.token_eos()]
print(json.dumps({"tokens": tokens, "logits": logits, "texts": texts}))
"""


@torch.no_grad()
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_llama_cpp_decodes_the_same_texts(attention: str, tmp_path: Path) -> None:
    import transformers

    words, folder, file = trained.pieces(), tmp_path / attention, str(tmp_path / "model.gguf")
    cfg = trained.config("gqa", trained.T6 | {"max_length": 64})
    ours: Any = trained.model_of(cfg, 300)
    language.export(ours, cfg, words, trained.record("gqa"), folder)
    if attention == "mla":
        ours = T6(300, 32, lambda _: MLA(32, 4, 8, 4, 12, norm="rms"), num_layers=2, ffn_dim=24, max_length=64)
        trained.fill(ours)
        deepseek.convert(ours).model.save_pretrained(folder)
    command = [sys.executable, "-c", CONVERT, SOURCES, str(folder), "--outtype", "f32", "--outfile", file]
    subprocess.run(command, env=environment(), check=True, timeout=300)
    prompts = trained.ids(8, 9, 280)
    options = {"model_path": file, "n_ctx": CELLS, "kv_overrides": {"deepseek2.attention.q_lora_rank": 0}}
    job = json.dumps({"options": options, "prompts": prompts.tolist(), "texts": TEXTS})
    done = subprocess.run([PYTHON, "-c", DECODE], input=job, capture_output=True, text=True, check=True, timeout=300)
    result = json.loads(done.stdout)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded.generation_config.suppress_tokens = None
    tokens = loaded.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False)
    assert result["tokens"] == tokens.tolist()
    torch.testing.assert_close(torch.tensor(result["logits"]), loaded(tokens).logits, rtol=0, atol=1e-4)
    mebibytes = 4 * sum(a.cache_elements(1, CELLS) for a in ours.attentions) / 2**20
    assert f"{mebibytes:.2f} MiB ( {CELLS} cells" in done.stderr
    assert result["texts"] == [*transformers.AutoTokenizer.from_pretrained(folder)(TEXTS).input_ids, words.end]
