"""Language models of transformers, dense or compressed, in lm-evaluation-harness.  Needs the extra `eval`."""

from dataclasses import dataclass
from typing import Any, Protocol

import attnlab.torchvision_schemas  # noqa: F401  (before transformers)

import torch
from torch import nn

from attnlab.config.bounds import bounded
from attnlab.errors import ConfigError
from attnlab.tasks.harness import Harness

try:
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ConfigError(f"mode=evaluate needs lm-evaluation-harness: pip install 'attnlab[eval]' ({error})") from error


class WithTokenizer(Protocol):
    """A language model and its tokenizer, both of transformers."""

    model: nn.Module
    tokenizer: Any


@bounded
@dataclass(frozen=True)
class TransformersEvaluation(Harness):
    """Evaluates a decoder of transformers on tasks of lm-evaluation-harness, through the harness's own class for it.

    The model is evaluated as it is: factors stay factors.
    """

    def lm(self, module: WithTokenizer, dtype: torch.dtype | None) -> HFLM:
        """The model in the harness's class.

        Raises:
            ConfigError: a masked language model, which gives no probability of a continuation.
        """
        model: Any = module.model
        if not model.can_generate():
            raise ConfigError(f"lm-evaluation-harness scores decoders; {type(model).__name__} is none")
        return HFLM(
            pretrained=model, tokenizer=module.tokenizer, batch_size=self.batch_size, mixed_precision_dtype=dtype
        )
