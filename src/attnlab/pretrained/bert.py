"""BERT and RoBERTa, as masked language models."""

from __future__ import annotations

from typing import Any, ClassVar

from attnlab.pretrained.base import Layer, Projection
from attnlab.pretrained.language import COMMON, LanguageModel

OPTIONS = (
    "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings type_vocab_size layer_norm_eps"
)

BASE = {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


class Bert(LanguageModel):
    """Separate projections, all with biases. The MLP has no module: `Layer.mlp` is that of its first matrix."""

    name = "bert"
    classes = {"bert": "BertForMaskedLM"}
    blocks = "bert.encoder.layer"
    options = COMMON | frozenset(OPTIONS.split())

    def layer(self, config: Any, path: str, index: int) -> Layer:
        attention, mlp = f"{path}.attention", f"{path}.intermediate"
        dim, hidden, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        projections = {
            name: Projection(f"{attention}.self.{part}", (dim, dim), "out", heads)
            for name, part in (("q", "query"), ("k", "key"), ("v", "value"))
        }
        projections["o"] = Projection(f"{attention}.output.dense", (dim, dim), "in", heads)
        projections["fc_in"] = Projection(f"{mlp}.dense", (hidden, dim))
        projections["fc_out"] = Projection(f"{path}.output.dense", (dim, hidden))
        dropout = (config.attention_probs_dropout_prob, config.hidden_dropout_prob)
        return Layer(path, attention, mlp, projections, (dim // heads) ** -0.5, dropout)


class Roberta(Bert):
    """BERT's layers under another name."""

    name = "roberta"
    classes = {"roberta": "RobertaForMaskedLM"}
    blocks = "roberta.encoder.layer"
    known: ClassVar[dict[str, dict[str, Any]]] = {"roberta-base": BASE, "FacebookAI/roberta-base": BASE}
