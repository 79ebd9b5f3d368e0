"""LoRA adapters of PEFT on compressed projections."""

from __future__ import annotations

import warnings
from typing import Any

from attnlab.compression.modules.base import kinds
from attnlab.errors import ConfigError


def register(config: Any) -> Any:
    """Return a LoRA config that adapts compressed projections like nn.Linear, by the same names in `target_modules`.

        peft.get_peft_model(model, register(peft.LoraConfig(target_modules=["q_proj", "v_proj"])))

    The adapter's output is added to that of the factors, and the adapter alone is trained. A saved adapter is loaded
    with `PeftModel.from_pretrained(model, folder, config=register(PeftConfig.from_pretrained(folder)))`.

    ConfigError: PEFT is not installed, or an adapter is merged later: the factors cannot hold the sum.
    """
    try:
        from peft.tuners.lora import Linear
    except ImportError as error:
        raise ConfigError("peft is not installed: pip install 'attnlab[lora]'") from error

    class Adapter(Linear):
        def __init__(self, *args: Any, **options: Any) -> None:
            with warnings.catch_warnings():  # peft warns of other classes, though these have in_features, out_features
                warnings.filterwarnings("ignore", message="Unsupported layer type")
                super().__init__(*args, **options)

        def merge(self, *args: Any, **options: Any) -> None:
            raise ConfigError(
                "an adapter cannot be merged into factors; leave it separate, or densify the model and load it there"
            )

    config._register_custom_module(dict.fromkeys(kinds().values(), Adapter))
    return config
