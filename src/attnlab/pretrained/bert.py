"""BERT and RoBERTa, as masked language models."""

from __future__ import annotations

from typing import Any, ClassVar

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
    attention, mlp = "attention", "intermediate"
    between = "adds its input and normalises the sum"
    places = {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
        "fc_in": "intermediate.dense",
        "fc_out": "output.dense",
    }
    fixed: ClassVar[dict[str, bool]] = {"is_decoder": False}
    missing = "attention to later positions"
    options = COMMON | frozenset(OPTIONS.split())


class Roberta(Bert):
    """BERT's layers under another name."""

    name = "roberta"
    classes = {"roberta": "RobertaForMaskedLM"}
    blocks = "roberta.encoder.layer"
    known: ClassVar[dict[str, dict[str, Any]]] = {"roberta-base": BASE, "FacebookAI/roberta-base": BASE}
