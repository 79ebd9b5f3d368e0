"""Tiny language models with random weights, which all affect the logits, and their configurations."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from attnlab.config.build import freeze
from attnlab.config.check import compose
from attnlab.data.text.tokenizer import Tokenizer
from attnlab.data.text.vocabulary import BytePairs, BytePairVocabulary, WordVocabulary
from attnlab.models import LanguageModel
from attnlab.models.build import build_model
from attnlab.pretrained.weights import write_weights
from attnlab.run.record import new, write
from attnlab.tasks.base import Trains, task_of
from tests.attention.mechanisms import composed

WORDS = WordVocabulary([*(f"w{i}" for i in range(27)), "<eos>", "<unk>"], "<eos>", "<unk>", "after")
T6 = {"_target_": "attnlab.models.T6", "num_layers": 3, "ffn_dim": 24, "max_length": 24, "output_init": "default"}
TENSORIZED = {
    "_target_": "attnlab.models.TensorizedTransformer", "num_layers": 2, "ffn_dim": 24, "max_length": 24,
    "cutoffs": [10, 20], "div_value": 2,
}  # fmt: skip
HYBRID = ("mtla", "sliding_window", "tpa")


def config(attention: str, model: dict[str, Any] = T6, **values: Any) -> DictConfig:
    """The part of a run's configuration that builds its model; `attention` may be "hybrid"."""

    def node(name: str) -> Any:
        cfg = composed(name, "task.model.d_model=32", "task.attention_heads=4", "task.attention_dropout=0.0",
                       "task.attention_bias=false", "task.attention_prefix=false")  # fmt: skip
        result = freeze(cfg, {"attention": name}).attention
        return OmegaConf.to_container(result, resolve=True)

    if attention == "hybrid":
        chosen: Any = {"pattern": list(HYBRID), "mechanisms": {name: node(name) for name in HYBRID}}
    else:
        chosen = node(attention) | values
    task = {"name": "wikitext2", "model": {"d_model": 32, **model}}
    return OmegaConf.create({"task": task, "attention": chosen, "prove": {"python": None}})


def model_of(cfg: DictConfig, size: int = WORDS.size) -> LanguageModel:
    """The model in eval mode, each parameter at random."""
    model: LanguageModel = build_model(cfg, vocab_size=size)
    fill(model)
    return model.eval()


@torch.no_grad()
def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        scale = 0.4 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def pieces(size: int = 300) -> BytePairVocabulary:
    """Byte pairs of a few sentences; ids above those of the tokenizer have no token."""
    text = ["the house of the rising sun", "they call the rising sun a house", "the sun of the house"]
    return BytePairVocabulary(BytePairs().learn(text, 280), size, "before")


def record(attention: str) -> dict[str, Any]:
    """A run's record, as far as a model card reads it."""
    return {
        "task": "wikitext2",
        "attention": attention,
        "corpus": "sample",
        "command": "python -m attnlab task=wikitext2",
        "parameters": {"total": 12345, "attention": 678},
        "quality": {"perplexity": 12.5, "unit": "word", "signature": "exp of the mean NLL per word"},
        "training": {"steps": 8},
        "seed": 1,
    }


def ids(rows: int, length: int, size: int = WORDS.size) -> Tensor:
    return torch.randint(size, (rows, length), generator=torch.Generator().manual_seed(1))


def run_directory(folder: Path, *settings: str) -> tuple[Path, Any]:
    """A finished run with random weights, as training leaves it, and its module."""
    cfg = compose("hardware=cpu", *settings)
    task: Any = task_of(cfg, Trains)
    folder.mkdir()
    if "vocabulary.json" in task.file_names:
        WORDS.save(folder / "vocabulary.json")
    elif "classes.json" in task.file_names:
        (folder / "classes.json").write_text('["cat", "dog", "hen"]')
    else:
        lines = ["the house of the rising sun", "they call the rising sun a house"]
        Tokenizer.train(lines, 40, hard_limit=False).save(folder / "tokenizer.model")
    weights = folder / "checkpoints" / "averaged.safetensors"
    module = task.rebuilt(weights)
    fill(module.model)
    module.model.eval()
    write_weights(weights, module.model.state_dict(), module.identity)
    OmegaConf.save(cfg, folder / "config.yaml")
    result = new(cfg, "python -m attnlab " + " ".join(settings)) | {"status": "finished", "corpus": "sample"}
    task.sizes(result, module.model)
    write(result, folder)
    return folder, module
