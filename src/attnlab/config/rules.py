"""What signatures cannot say: bounds of other libraries' arguments, and how keys must relate to each other."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.errors import ConfigError

# Annotations of arguments of torch and timm, by key. They are checked beside what the library declares itself.
FOREIGN = {
    "task.optimizer.lr": "Annotated[float, Ge(0)]",
    "task.optimizer.eps": "Annotated[float, Ge(0)]",
    "task.optimizer.betas": "list[Annotated[float, Ge(0), Lt(1)]]",
    "task.optimizer.weight_decay": "Annotated[float, Ge(0)]",
    "task.schedule.warmup_epochs": "Annotated[int, Ge(0)]",
    "task.schedule.warmup_lr": "Annotated[float, Ge(0)]",
    "task.schedule.min_lr": "Annotated[float, Ge(0)]",
    "task.mixup.mixup_alpha": "Annotated[float, Ge(0)]",
    "task.mixup.cutmix_alpha": "Annotated[float, Ge(0)]",
    "task.mixup.prob": "Annotated[float, Ge(0), Le(1)]",
    "task.mixup.switch_prob": "Annotated[float, Ge(0), Le(1)]",
}


def check_relations(cfg: DictConfig) -> None:
    """Check the keys that depend on each other.

    Args:
        cfg: the whole resolved configuration.

    Raises:
        ConfigError: names both keys and what is expected of them.
    """

    def get(key: str) -> Any:
        return OmegaConf.select(cfg, key)

    devices = get("hardware.devices")
    if OmegaConf.is_list(devices) and len(set(devices)) < len(devices):
        raise ConfigError(f"hardware.devices={devices}: expected each device once")
    decode = cfg.task.get("decode")
    if decode is not None and not decode.get("max_len_a") and decode.get("min_len", 0) > decode.get("max_len_b", 0):
        raise ConfigError(
            f"task.decode.min_len={decode.min_len}: expected at most task.decode.max_len_b={decode.max_len_b}"
        )
    width = get("task.model.d_model")
    for part in ("encoder", "decoder"):
        heads = get(f"task.model.{part}.num_heads")
        if isinstance(width, int) and isinstance(heads, int) and width % heads:
            raise ConfigError(f"task.model.{part}.num_heads={heads}: expected a divisor of task.model.d_model={width}")
    size, patch = get("task.data.image_size"), get("task.model.patch_size")
    if size is not None and patch is not None and size % patch:
        raise ConfigError(f"task.data.image_size={size}: expected a multiple of task.model.patch_size={patch}")
