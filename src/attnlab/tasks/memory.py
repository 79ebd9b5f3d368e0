"""Memory of a training: one update of the configured model is rehearsed before the corpus is read.

On a CUDA device the update is run and the allocator tells its peak. Elsewhere the storages of its tensors are counted
under torch's FakeTensorMode, where nothing is computed and no memory is needed: `mode=describe`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlab.config.batch import configured_processes
from attnlab.errors import ConfigError
from attnlab.models.build import without_memory
from attnlab.run.cache import digest, read_index, stored, write_index
from attnlab.run.device import device_of, scoring_dtype
from attnlab.run.identity import recipe
from attnlab.run.record import first_process
from attnlab.training.gradient_checkpointing import checkpoint_layers

if TYPE_CHECKING:
    from attnlab.tasks.base import Trains

log = logging.getLogger(__name__)

GIB = 2**30
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
SAFE = 0.95  # share of the free memory that a searched batch may take: a long training leaves gaps
SEARCH_VERSION = 2  # of the stored results of `with_largest_batch`
EXACT = 16  # precision of the search: one part in 16


@dataclass(frozen=True)
class Memory:
    """Bytes of one process.

    Args:
        weights: parameters and buffers, also of averaged copies and a teacher.
        gradients: of trained parameters; with several processes, the buckets being sent as well.
        activations: the rest at the peak: saved activations, logits, temporaries.
        decoding_cache: of the largest decoding batch, which does not exist during an update.
    """

    weights: int
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    decoding_cache: int = 0

    @property
    def update(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + self.activations

    @property
    def total(self) -> int:
        """The larger of an update and decoding."""
        return max(self.update, self.weights + self.decoding_cache)

    def describe(self) -> dict[str, float]:
        """MiB for the record."""
        return {f"{name}_mib": round(size / 2**20, 1) for name, size in (asdict(self) | {"total": self.total}).items()}

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in asdict(self).items())
        return f"{self.total / GIB:.2f} GiB ({parts})"


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages created inside that are still alive: `live` now, `peak` at most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def count(self, tensor: Tensor) -> None:
        """Add the storage of a tensor of any shape, once."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self.count(value)
        return out


def copied(model: nn.Module, device: torch.device | str) -> nn.Module:
    """A copy of a model on another device, with zeros as values. Tied tensors stay tied, unlike with `to_empty`."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for x in (*module.parameters(False), *module.buffers(False), *vars(module).values()):
            if isinstance(x, Tensor):
                new = torch.zeros(x.shape, dtype=x.dtype, device=device)
                memo[id(x)] = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
    return copy.deepcopy(model, memo)


def rehearse(task: Trains, size: int, device: torch.device, *, fake: bool = False) -> Memory | None:
    """The memory of one update with a model of zeros, neither compiled nor sharded; None: it does not fit.

    Args:
        size: of the batch, in the unit of `task.batch_key`.
        device: of the run, for which kernels are chosen.
        fake: whether nothing is computed; always so on the CPU.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    scoring, model = scoring_memory(task)
    if task.cfg.hardware.precision == "bf16-true":
        model.to(torch.bfloat16)
    on_cuda, live = device.type == "cuda" and not fake, LiveTensors()
    modes = (contextlib.nullcontext(), contextlib.nullcontext()) if on_cuda else (FakeTensorMode(), live)
    try:
        with torch.random.fork_rng([device] if on_cuda else []), modes[0], modes[1]:
            before = torch.cuda.memory_allocated(device) if on_cuda else 0
            weights, gradients, state = _update(task, copied(model, device), size, device, live)
            peak = torch.cuda.max_memory_allocated(device) - before if on_cuda else live.peak
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):  # of cuBLAS and cuDNN
            raise
        return None
    finally:
        if on_cuda:
            gc.collect()
            torch.cuda.empty_cache()
    return Memory(weights, gradients, state, peak - weights - gradients - state, scoring.decoding_cache)


def scoring_memory(task: Trains) -> tuple[Memory, nn.Module]:
    """The memory of scoring, without activations; and the model, without storage."""
    with without_memory():
        model = task.build()
    cache = task.decoding_cache(model, scoring_dtype(task.cfg.hardware.precision) or torch.float32)
    return Memory(size_of([*model.parameters(), *model.buffers()]), decoding_cache=cache), model


def _update(task: Trains, model: nn.Module, size: int, device: torch.device, live: LiveTensors) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state of an update after the first, in the trainer's order."""
    copies, several = task.copies(), _processes(task.cfg) > 1
    trained = [p for p in model.train().parameters() if p.requires_grad]
    tensors = [*model.parameters(), *model.buffers()]
    others = [torch.empty_like(x) for x in tensors * copies + trained * several]
    optimizer = task.optimizer_of(model)
    for group in optimizer.param_groups:  # the fused kernel that training takes on CUDA has no temporaries
        group.update({name: False for name in ("foreach", "fused") if name in group})
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = size_of(x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor))
    if task.cfg.hardware.gradient_checkpointing:
        checkpoint_layers(model)
    with torch.device(device):
        loss = task.rehearsal(model, size, device)
    live.peak = live.live
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)
    half = AUTOCAST.get(task.cfg.hardware.precision)
    with torch.autocast(device.type, half, cache_enabled=False) if half else contextlib.nullcontext():
        value = loss()
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    del others
    return size_of(tensors) * (1 + copies), size_of(trained) * (1 + several), state


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of different `tensors`, of any shape and device."""
    return sum(x.numel() * x.itemsize for x in tensors)


def estimate(task: Trains) -> Memory | None:
    """The memory of a configured training, on any machine; None: sizes in it depend on the data.

    Without the configured GPU the kernels are those of the CPU, which store as much.
    """
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    on_cuda = torch.cuda.is_available() and task.cfg.hardware.accelerator != "cpu"
    try:
        return rehearse(task, configured_batch(task), torch.device("cuda" if on_cuda else "cpu"), fake=True)
    except DynamicOutputShapeException:
        log.warning("memory: not estimated: sizes in the training step of this model depend on the values in a batch")
        return None


def check_memory(task: Trains, record: dict[str, Any], training: bool = True) -> None:
    """Record the memory of a run on a CUDA device, in MiB, and refuse a training that does not fit.

    The first process rehearses for all of them.

    Args:
        training: False: weights and caches of scoring alone.

    Raises:
        ConfigError: an update does not fit the device; names the keys to lower.
    """
    if not first_process():
        return
    device, hardware = device_of(task.cfg), task.cfg.hardware
    free, total = torch.cuda.mem_get_info(device)
    measured = rehearse(task, configured_batch(task), device) if training else scoring_memory(task)[0]
    memory = measured or estimate(task)
    if memory:
        record["memory"] = memory.describe()
        log.info("memory: about %s; free: %.2f of %.2f GiB", memory, free / GIB, total / GIB)
    if measured:
        return
    keys = [f"task.data.{task.batch_key} below {task.cfg.task.data[task.batch_key]} (an update stays as it is)"]
    keys += ["hardware.gradient_checkpointing=true (slower)"] * (not hardware.gradient_checkpointing)
    keys += ["hardware.precision=bf16-mixed (half the activations)"] * (hardware.precision == "32-true")
    advice = f"set {', '.join(keys)}"
    if memory and memory.update - memory.activations > free:
        advice = "that is too much without any batch: take a smaller model, or hardware=fsdp on several GPUs"
    name = torch.cuda.get_device_name(device)
    message = f"the run needs about {memory or 'more'}, and {name} has {free / GIB:.2f} GiB free: {advice}"
    if not (hardware.compile or hardware.strategy == "fsdp"):
        raise ConfigError(message)
    log.warning("%s (hardware.compile and hardware=fsdp need less than this)", message)


def configured_batch(task: Trains) -> int:
    """The largest batch of one process, in the unit of `task.batch_key`: the limit of its key, or all of an update."""
    return max(1, min(batch_range(task)[1], int(task.cfg.task.data[task.batch_key])))


def batch_range(task: Trains) -> tuple[int, int]:
    """The smallest batch that the data can have, and the largest useful one: the share of one process in an update."""
    data, update, processes = task.cfg.task.data, task.cfg.task.train.batch, _processes(task.cfg)
    if "tokens" in update:
        return 1, max(1, update.tokens // data.window // processes)
    if "sequences" in update:
        return 1, max(1, update.sequences // processes)
    if "images" in update:
        return 2, max(2, update.images // processes)  # images are mixed in pairs
    bucket, longest = int(update.bucket), max(data.max_input_frames, data.max_target_tokens)
    return (min(bucket, longest + 1), bucket) if update.split else (bucket, bucket)


def _processes(cfg: DictConfig) -> int:
    return configured_processes(cfg) or max(1, torch.cuda.device_count())


def with_largest_batch(task: Trains, record: dict[str, Any]) -> DictConfig:
    """`hardware.find_batch`: the configuration with the largest batch of one process that fits its device.

    `task.train.batch` states the update, and the accumulated batches follow. The first process of a machine searches
    and stores the size in the cache directory; other processes and later runs read it. `record` gets `found_batch`.

    Raises:
        ConfigError: the smallest batch does not fit, or on the CPU no memory is configured.
    """
    cfg, device, name = task.cfg, device_of(task.cfg), "cpu"
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        name = f"{about.name}, {about.total_memory >> 20} MiB"
    elif cfg.hardware.find_batch_gib is None:
        raise ConfigError("hardware.find_batch=true: no GPU here; give hardware.find_batch_gib=<GiB>")
    depends = [SEARCH_VERSION, name, _processes(cfg), recipe(cfg), OmegaConf.to_container(cfg.hardware)]
    folder = Path(cfg.cache_dir).expanduser() / "batches" / digest(depends)[:24]

    def search(partial: Path) -> None:
        write_index(partial, {"device": name, "batch": _search(task, device)})

    size, key = int(stored(folder, read_index, search)["batch"]), f"task.data.{task.batch_key}"
    if first_process():
        log.info("%s=%d: the largest batch that fits (%s)", key, size, folder)
    record["found_batch"] = {"key": key, "size": size}
    return OmegaConf.merge(cfg, {"task": {"data": {task.batch_key: size}}})  # type: ignore[return-value]


def _search(task: Trains, device: torch.device) -> int:
    gib = task.cfg.hardware.find_batch_gib
    limit = int(SAFE * torch.cuda.mem_get_info(device)[0]) if gib is None else int(gib * GIB)
    least, most = batch_range(task)

    def fits(size: int) -> bool:
        memory = rehearse(task, size, device)
        fit = memory is not None and memory.update <= limit
        if first_process():
            log.info("a batch of %d %s in %.3f GiB", size, "fits" if fit else "does not fit", limit / GIB)
        return fit

    size = largest(fits, least, most)
    if size is None:
        raise ConfigError(
            f"hardware.find_batch=true: not even task.data.{task.batch_key}={least} fits; take a smaller model, "
            "hardware.gradient_checkpointing=true, or hardware.precision=bf16-mixed"
        )
    return size


def largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest size that fits, at most `most`, to about 6 %; None: `least` does not fit.

    Sizes are doubled until one does not fit, then bisected.
    """
    good, bad, size = least - 1, most + 1, min(least, most)
    while bad - good > max(1, good // EXACT if good >= least else 0):
        if fits(size):
            good = size
        else:
            bad = size
        size = min(2 * good, most) if bad > most else (good + bad) // 2
    return good if good >= least else None
