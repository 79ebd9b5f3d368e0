"""Export of any trained model as plain weights: safetensors, a config of plain values, and what its run has beside."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from attnlab.attention import Attention
from attnlab.export.card import card
from attnlab.export.weights import CONFIG, README, WEIGHTS, copy, new_folder, save, write_json
from attnlab.models.build import count_parameters

USAGE = """```python
from safetensors.torch import load_file

weights = load_file("{weights}")
```

The names are those of the model's modules. `{config}` has the classes of attnlab that they belong to, with every
argument, so that the same model can be built with attnlab or written anew.{files}"""


def export(
    model: nn.Module,
    attentions: list[Attention],
    cfg: DictConfig,
    record: Mapping[str, Any],
    files: Iterable[Path],
    folder: Path,
) -> None:
    """Write `model.safetensors`, `config.json`, copies of `files`, and the model card.

    Args:
        attentions: those of its mechanisms that keep a cache in decoding.
        files: tokenizers, vocabularies, class names and the like, which the run directory holds.
        folder: replaced as a whole when the new one is complete.

    Raises:
        WriteError: the folder cannot be written; an earlier one then stays.
    """
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    about = {
        "task": cfg.task.name,
        "attention": plain.get("attention"),
        "model": plain["task"]["model"],
        "features": plain["task"]["data"].get("features"),
        "decode": plain["task"].get("decode"),
        "parameters": count_parameters(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    with new_folder(folder) as partial:
        save(partial, model.state_dict())
        names = copy(files, partial)
        known = {key: value for key, value in about.items() if value is not None}
        write_json(partial / CONFIG, {**known, "files": names})
        beside = f" Beside it: {', '.join(f'`{name}`' for name in names)}." if names else ""
        text = card(
            record,
            title=f"{record['task']}, {record['attention']}",
            usage=USAGE.format(weights=WEIGHTS, config=CONFIG, files=beside),
            attentions=attentions,
            dtype=next(model.parameters()).dtype,
        )
        (partial / README).write_text(text, encoding="utf-8")
