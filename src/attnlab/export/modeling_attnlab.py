"""A language model of attnlab with transformers' interface: `generate` uses the small cache of its attention."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnlab.attention import Cache as LayerCache
from attnlab.export.classes import CLASSES
from attnlab.models.language_model import LanguageModel

# The name of the cache in `generate` and in outputs; transformers before 5.24 calls it past_key_values.
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"


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


class Rows(NamedTuple):
    """Rows of a batch with equal padding; `places` (rows,) int64 are their numbers in the batch."""

    places: Tensor
    padding: int  # positions on the left
    caches: list[LayerCache]  # one for each layer


class AttnlabCache(Cache):
    """The caches of all layers, in the form of the attention mechanism: latents, factors or states.

    The mechanisms have no masks for padding. Rows with padding on the left are computed without it: rows with equal
    padding share one cache, whose first position is their first token.

    Args:
        capacity: positions of each row, padding included.
    """

    is_croppable = False
    is_linear: list[bool] = [False]  # `generate` reads `get_seq_length` and skips the cached tokens of a prompt

    def __init__(self, model: LanguageModel, capacity: int) -> None:
        if capacity > model.longest:
            raise ValueError(
                f"a text of {capacity} positions is longer than the {model.longest} of this model; shorten the prompt "
                "or lower max_new_tokens"
            )
        super().__init__(layers=[])
        self.capacity, self.length = capacity, 0
        self._model = model
        self.rows: list[Rows] = []

    def open(self, groups: list[tuple[Tensor, int]]) -> None:
        """Allocate the caches of groups: rows of the batch, and their padding on the left."""
        self.rows = [
            Rows(places, padding, self._model.start(len(places), self.capacity - padding)) for places, padding in groups
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all rows and layers, as allocated."""
        return sum(cache.nbytes for rows in self.rows for cache in rows.caches)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of cached positions, including padding."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Maximal number of positions, including padding."""
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in older versions

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Copy row `beam_idx[i]` to row i. ValueError: the two have different padding."""
        for rows in self.rows:
            wanted = beam_idx.to(rows.places.device)[rows.places]
            match = wanted[:, None] == rows.places
            if not bool(match.any(1).all()):
                raise ValueError("beams of texts with different padding cannot be exchanged")
            for cache in rows.caches:
                cache.reorder(match.int().argmax(1))

    def reset(self) -> None:
        """Empty the cache; the next batch may have other rows."""
        self.rows, self.length = [], 0

    def _refuse(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError("a cache of merged positions or states cannot be cropped, repeated or selected")

    crop = batch_repeat_interleave = batch_select_indices = _refuse


class AttnlabForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of attnlab with the loss and the generation of transformers.

    Attributes:
        model: the language model itself.
    """

    config_class = AttnlabConfig
    _is_stateful = True  # no assisted decoding: merged positions cannot be taken back one by one

    def __init__(self, config: AttnlabConfig) -> None:
        super().__init__(config)
        layers = [config.mechanisms[i % len(config.mechanisms)] for i in range(config.num_hidden_layers)]
        self.model: LanguageModel = _build(
            config.model, vocab_size=config.vocab_size, attention=lambda layer: _build(layers[layer])
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: constructors initialise the weights."""

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table; NotImplementedError if it is the output layer."""
        embedding = getattr(self.model, "embedding", None)
        if not isinstance(embedding, nn.Module):
            raise NotImplementedError(f"the embeddings of {type(self.model).__name__} are its output layer")
        return embedding

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *more: Any, **others: Any
    ) -> None:
        """Allocate a cache of the exact length of `generate`; the last token is never read."""
        if "cache" in model_kwargs:
            model_kwargs[CACHE] = model_kwargs.pop("cache")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *more, **others)  # type: ignore[misc]
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = AttnlabCache(self.model, max(generation_config.max_length - 1, 1))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: AttnlabCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        past_key_values: AttnlabCache | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next tokens.

        Args:
            input_ids: (B, T) int64; with a cache, the tokens after the cached ones.
            attention_mask: (B, all positions so far), 1 for tokens, 0 for padding: on the left or, without a cache, on
                either side. Logits at padding are zero on the left and unspecified on the right.
            cache: the cache to continue, without gradients. None: all positions in parallel.
            labels: (B, T) int64, for the mean loss of the next tokens; -100 is not counted.
            use_cache: create a cache if `cache` is None. False by default, unlike in other models: a cache has a size,
                which `generate` knows.
            logits_to_keep: number of last positions, or these positions; 0: all.
            past_key_values: the former name of `cache`.

        ValueError: a text longer than the model's maximum, padding between tokens, or a cache of another class.
        """
        batch, new = input_ids.shape
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = AttnlabCache(self.model, self.model.longest)
        if cache is None:
            logits = self._parallel(input_ids, _groups(attention_mask, batch, new, input_ids.device, right=True))
        elif isinstance(cache, AttnlabCache):
            logits = self._cached(input_ids, attention_mask, cache)
        else:
            raise ValueError(f"cache is a {type(cache).__name__}; expected an AttnlabCache, or None")
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        fields: dict[str, Any] = {"loss": loss, "logits": logits[:, positions], CACHE: cache}
        output = CausalLMOutputWithPast(**fields)
        return output if return_dict is not False else output.to_tuple()

    def _parallel(self, tokens: Tensor, groups: list[tuple[Tensor, int]]) -> Tensor:
        if len(groups) == 1 and not groups[0][1]:
            return self.model(tokens)
        return _joined([(rows, self.model(tokens[rows, padding:])) for rows, padding in groups], tokens)

    def _cached(self, tokens: Tensor, mask: Tensor | None, cache: AttnlabCache) -> Tensor:
        batch, new = tokens.shape
        if not cache.rows:
            cache.open(_groups(mask, batch, new, tokens.device))
        elif batch != (rows_of_cache := sum(len(rows.places) for rows in cache.rows)):
            raise ValueError(f"{batch} rows; the cache was begun with {rows_of_cache}")
        elif mask is not None and not bool(mask[:, -new:].all()):
            raise ValueError("padding cannot follow a text that a cache holds (padding_side='left')")
        parts = []
        for rows in cache.rows:
            unseen = tokens[rows.places, max(rows.padding - cache.length, 0) :]
            parts.append((rows.places, self.model.step(unseen, rows.caches)))
        cache.length += new
        return parts[0][1] if len(parts) == 1 and parts[0][1].shape[1] == new else _joined(parts, tokens)


def _build(values: Any, **more: Any) -> Any:
    """Build the object of a description in plain values, and those nested in it."""
    if not isinstance(values, dict) or "class" not in values:
        return values
    arguments = {key: _build(value) for key, value in values.items() if key != "class"}
    return CLASSES[values["class"]](**arguments, **more)


def _groups(
    mask: Tensor | None, batch: int, size: int, device: torch.device, right: bool = False
) -> list[tuple[Tensor, int]]:
    """Rows with equal padding on the left, and its length. `right`: padding on the right is valid too."""
    everything = torch.arange(batch, device=device)
    if mask is None:
        return [(everything, 0)]
    real = mask.to(device).bool()
    if real.shape != (batch, size):
        raise ValueError(f"the attention mask has shape {tuple(real.shape)}; expected {(batch, size)}")
    left = (real.cumsum(1) == 0).sum(1)
    count = real.sum(1)
    ends = left + count if right else torch.full_like(left, size)
    place = torch.arange(size, device=device)
    if not torch.equal(real, (place >= left[:, None]) & (place < ends[:, None])) or not bool(count.all()):
        where = "on the left or the right of a text" if right else "on the left of a text (padding_side='left')"
        raise ValueError(f"padding must stand {where}, with at least one token in each row")
    return [(everything[left == padding], padding) for padding in left.unique().tolist()]


def _joined(parts: list[tuple[Tensor, Tensor]], tokens: Tensor) -> Tensor:
    """Logits of groups of rows in one tensor, (B, T, V), zero at the padding on the left."""
    first = parts[0][1]
    joined = first.new_zeros(*tokens.shape, first.shape[-1])
    size = tokens.shape[1]
    for rows, logits in parts:
        columns = torch.arange(size - logits.shape[1], size, device=tokens.device)
        joined = joined.index_put((rows[:, None], columns), logits)
    return joined
