"""The Llama of transformers beside the task's language model: as wide, with as many layers, heads and parameters."""

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.attention import Attention
from attnlab.bench.variants import AttentionVariant
from attnlab.errors import ConfigError
from attnlab.models import LanguageModel
from attnlab.pretrained.hub import transformers

PEERS = ("llama", "llama_static", "llama_compiled")  # its growing cache, the preallocated one, and that compiled


@dataclass(frozen=True)
class PeerVariant(AttentionVariant):
    """A model of transformers, as it is there: `name` is one of PEERS."""

    def attention(self, dtype: torch.dtype, device: torch.device) -> Attention:
        raise LookupError(f"{self.name} is a language model: measure it with bench.what=generation, prefill or model")

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Any:
        return self.attention(dtype, device)

    def model(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        torch.manual_seed(self.cfg.seed)
        return Peer(self.name, self.cfg).to(device, dtype).eval()


class PeerCache:
    """A cache of transformers."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def buffers(self) -> list[Tensor]:
        return [buffer for layer in self.cache.layers if layer.is_initialized for buffer in (layer.keys, layer.values)]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def reorder(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)


class Peer(LanguageModel):
    """LlamaForCausalLM with SDPA and random weights. Steps give the logits of their last position."""

    def __init__(self, kind: str, cfg: DictConfig) -> None:
        super().__init__()
        library, model = transformers(), cfg.task.model
        if "ffn_dim" not in model or "num_layers" not in model:
            raise ConfigError(f"bench.references: {kind}: the task's model is no decoder; take task=wikitext2")
        self.kind = kind
        heads, width = cfg.task.attention_heads, model.d_model
        self.config = library.LlamaConfig(
            vocab_size=cfg.task.data.vocab_size, hidden_size=width, num_hidden_layers=model.num_layers,
            intermediate_size=8 * width // 3 if model.ffn_dim is None else model.ffn_dim, num_attention_heads=heads,
            num_key_value_heads=heads, tie_word_embeddings=True, max_position_embeddings=1 << 20,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.llama = library.LlamaForCausalLM(self.config)
        self.layers = nn.ModuleList()  # none of its layers has a mechanism
        self.called = torch.compile(self.llama) if kind == "llama_compiled" else self.llama

    def start(self, batch: int, capacity: int, **_: Any) -> list[Any]:
        library = transformers()
        if self.kind == "llama":
            return [PeerCache(library.DynamicCache(config=self.config))]
        return [PeerCache(library.StaticCache(config=self.config, max_cache_len=capacity))]

    @torch.no_grad()
    def read(self, tokens: Tensor, caches: list[Any]) -> None:
        """Fill the caches with a text (B, n), not compiled."""
        self.llama(tokens, past_key_values=caches[0].cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def step(self, tokens: Tensor, caches: list[Any]) -> Tensor:
        cache = caches[0].cache
        logits: Tensor = self.called(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.called(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(targets)
