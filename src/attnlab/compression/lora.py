"""LoRA adapters of PEFT on compressed projections."""

from __future__ import annotations

import warnings
from typing import Any

from attnlab.compression.modules.base import kinds
from attnlab.errors import ConfigError


def register(config: Any) -> Any:
    """Let a LoRA config find compressed projections as it finds nn.Linear: by the same names in `target_modules`.

        peft.get_peft_model(model, register(peft.LoraConfig(target_modules=["q_proj", "v_proj"])))

    The adapter adds to what the factors give, and only the adapter is trained. A saved adapter is loaded with
    `PeftModel.from_pretrained(model, folder, config=register(PeftConfig.from_pretrained(folder)))`.

    Returns:
        `config`.

    Raises:
        ConfigError: PEFT is not installed. A later merge of the adapter raises it too: factors cannot hold the sum.
    """
    try:
        from peft.tuners.lora import Linear
    except ImportError as error:
        raise ConfigError("peft is not installed: pip install 'attnlab[lora]'") from error

    class Adapter(Linear):
        def __init__(self, *args: Any, **options: Any) -> None:
            with warnings.catch_warnings():  # the sizes are there: in_features and out_features
                warnings.filterwarnings("ignore", message="Unsupported layer type")
                super().__init__(*args, **options)

        def merge(self, *args: Any, **options: Any) -> None:
            raise ConfigError(
                "an adapter cannot be merged into factors; keep it apart, or densify the model and load it there"
            )

    config._register_custom_module(dict.fromkeys(kinds().values(), Adapter))
    return config
