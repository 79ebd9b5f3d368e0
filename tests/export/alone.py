"""A program without attnlab: it runs the cards of exported folders with transformers alone and writes their outputs.

Arguments: a folder of :func:`link_packages`, and folders. FOLDER.json has the inputs, FOLDER.answer the outputs.
"""

import builtins
import contextlib
import json
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any


def link_packages(place: Path, *names: str) -> Path:
    """Link what `pip install NAMES` installs in a fresh environment, and nothing else, into a new folder."""
    from packaging.requirements import Requirement

    place.mkdir()
    todo, seen = list(names), set[str]()
    while todo:
        name = todo.pop()
        with contextlib.suppress(PackageNotFoundError):  # optional for other packages, such as CUDA's
            package = distribution(name)
            for top in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
                if not (place / top).exists():
                    (place / top).symlink_to(str(package.locate_file(top)))
            needed = [Requirement(text) for text in package.requires or ()]
            todo += [
                r.name for r in needed if r.name not in seen and (not r.marker or r.marker.evaluate({"extra": ""}))
            ]
            seen.update(todo)
    return place


def run_card(folder: Path) -> dict[str, Any]:
    """The names that the Python code of a card defines, run in the folder above as it is written."""
    code = re.search("```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    with contextlib.chdir(folder.parent):
        exec(code[1], names)
    return names


def refuse_question(text: str) -> None:
    sys.exit(f"a question was asked: {text}")


def main(packages: str, folders: list[str]) -> None:
    sys.path.append(packages)
    builtins.input = refuse_question  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    for folder in map(Path, folders):
        asked: dict[str, Any] = json.loads(folder.with_suffix(".json").read_text())
        names = run_card(folder)
        model = names["model"]
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
        answer["tokens"] = names["tokenizer"](asked["text"]).input_ids
        answer["plain"] = names["tokenizer"](asked["text"], add_special_tokens=False).input_ids
        answer["text"] = names["tokenizer"].decode(answer["plain"])
        answer["other"] = sorted({"attnlab", "torchvision", "timm", "sentencepiece"} & set(sys.modules))
        folder.with_suffix(".answer").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
