"""The language model that the engine runs: attnlab's own modules, with paged caches."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig

from attnlab.export.modeling_attnlab import AttnlabForCausalLM
from attnlab_vllm.config import check_engine
from attnlab_vllm.window import paged


class ServedModel(nn.Module):
    """A `T6` or `Decoder` by the interface of vLLM, which joins the new tokens of all requests, N, in one row.

    Attributes:
        model: the language model. Its weights have the names of the exported file.
        layers: the paged form of each layer's mechanism.
        unused: ids without a token, which are never chosen: `suppress_tokens` of generation_config.json.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        check_engine(vllm_config)
        self.model: Any = AttnlabForCausalLM(vllm_config.model_config.hf_config).model
        self.layers = paged(self.model.attentions, prefix, vllm_config)
        generation = vllm_config.model_config.try_get_generation_config()
        self.unused: list[int] = generation.get("suppress_tokens") or []

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """(N,) -> (N, d), without learned positions."""
        return self.model.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """input_ids (N,) at positions (N,) of their requests -> hidden states (N, d). The others are always None."""
        x = self.model.embed(input_ids[None], positions)
        for block, layer in zip(self.model.blocks, self.layers, strict=True):
            x = block(x, layer)
        return self.model.final(x)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """(N, d) -> (N, V)."""
        logits = self.model.logits(hidden_states)
        if self.unused:
            logits[..., self.unused] = float("-inf")
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy weights by name. RuntimeError: a name or a shape differs, or a weight is missing."""
        self.load_state_dict(dict(weights))
        for layer in self.layers:
            layer.cache = None  # it has products of the weights
        return set(self.state_dict())
