"""A program without attnlab: it loads exported folders with transformers alone and writes their outputs.

Arguments: folders. FOLDER.json has the inputs, FOLDER.answer the outputs.
"""

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class Refuse:
    """A finder that hides an installed attnlab."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] == "attnlab":
            raise ModuleNotFoundError(f"No module named {name!r}")


REPAIR = Path(__file__).parents[2] / "src/attnlab/torchvision_schemas.py"  # of torchvision beside a CPU build of torch


def main(folders: list[str]) -> None:
    sys.meta_path.insert(0, Refuse())
    runpy.run_path(str(REPAIR))
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    for folder in map(Path, folders):
        asked: dict[str, Any] = json.loads(folder.with_suffix(".json").read_text())
        with_code = any(folder.glob("*.py"))
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=with_code)
        ids = torch.tensor(asked["ids"])
        answer: dict[str, Any] = {"class": type(model).__name__, "training": model.training}
        with torch.no_grad():
            answer["logits"] = model(ids).logits.tolist()
        made: dict[str, Any] = {}
        for name, options in asked["generate"].items():
            torch.manual_seed(0)
            rows = torch.tensor(options.pop("ids"))
            mask = torch.tensor(options.pop("mask")) if "mask" in options else torch.ones_like(rows)
            out = model.generate(rows, attention_mask=mask, return_dict_in_generate=True, **options)
            made[name] = out.sequences[:, rows.shape[1] :].tolist()
            answer.setdefault("bytes", {})[name] = getattr(out.past_key_values, "nbytes", None)
        answer["generate"] = made
        if (folder / "tokenizer_config.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            answer["tokens"] = tokenizer(asked["text"]).input_ids
            answer["plain"] = tokenizer(asked["text"], add_special_tokens=False).input_ids
            answer["text"] = tokenizer.decode(answer["plain"])
        answer["attnlab"] = sorted(name for name in sys.modules if name.partition(".")[0] == "attnlab")
        folder.with_suffix(".answer").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
