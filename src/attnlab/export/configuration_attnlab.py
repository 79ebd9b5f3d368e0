"""The config of a language model of attnlab, for transformers."""

from typing import Any

from transformers import PretrainedConfig


class AttnlabConfig(PretrainedConfig):
    """The classes of the model and of its attention, with their arguments.

    Args:
        model: {"class": name, argument: value, ...} of the language model, without its attention.
        mechanisms: the same of each mechanism. Layer i has mechanism i, modulo their number.
        max_position_embeddings: the maximal length of a text in tokens.
    """

    model_type = "attnlab"

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        mechanisms: list[dict[str, Any]] | None = None,
        vocab_size: int = 0,
        hidden_size: int = 0,
        num_hidden_layers: int = 0,
        max_position_embeddings: int = 0,
        **kwargs: Any,
    ) -> None:
        self.model, self.mechanisms = model or {}, mechanisms or []
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**{"tie_word_embeddings": False, **kwargs})  # shared weights are one parameter here
