"""How much memory a training step needs, known before data are read: the step is run once without storage.

torch's FakeTensorMode gives every tensor of the step its shape, device and kernel, and computes nothing. What would
be alive at the same time is counted by its storage, so that the sum is exact up to what kernels use inside, the
allocator's rounding and what the device's context takes.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlab.models.build import without_memory
from attnlab.training.gradient_checkpointing import checkpoint_layers
from attnlab.training.stand_ins import StandIns

log = logging.getLogger(__name__)

GIB = 2**30
HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # what products are computed in


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that were made inside and are still alive.

    Args:
        limit: the most bytes that may be alive; None: no limit.

    Attributes:
        live: bytes now.
        peak: the most so far.

    Raises:
        torch.OutOfMemoryError: an operation would exceed the limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit, self.live, self.peak = limit, 0, 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, once.

        Args:
            tensor: of any kind.
        """
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, size)
        if self.limit is not None and self.live > self.limit:
            raise torch.OutOfMemoryError(f"more than {self.limit / GIB:.2f} GiB")

    def _freed(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self.count(value)
        return out


@dataclass(frozen=True)
class Estimate:
    """Bytes of one process.

    Args:
        weights: parameters and buffers, with copies that are averaged or taught from.
        gradients: of the parameters that are trained; with several processes, those that are being sent too.
        optimizer: its state.
        activations: at the peak, everything else: what the backward pass needs, logits, temporaries.
        cache: of keys and values of the largest decoding batch, which is not there at the same time as the three
            before it.
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """The most that is needed at one time: of training, or of decoding."""
        return self.weights + max(self.gradients + self.optimizer + self.activations, self.cache)

    def describe(self) -> dict[str, float]:
        """For the record: MiB by what they hold."""
        held = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer_state": self.optimizer,
            "activations": self.activations,
            "decoding_cache": self.cache,
            "total": self.total,
        }
        return {f"{name}_mib": round(size / 2**20, 1) for name, size in held.items()}

    def __str__(self) -> str:
        held = self.describe()
        parts = [f"{name[:-4].replace('_', ' ')} {mib / 1024:.2f}" for name, mib in held.items()]
        return f"{self.total / GIB:.2f} GiB ({', '.join(parts[:-1])})"


@contextlib.contextmanager
def computing_in(device: torch.device, precision: str) -> Iterator[None]:
    """Inside, products are computed in the type of a `hardware.precision`.

    Args:
        device: of the run.
        precision: as in the configuration.
    """
    half = HALVES.get(precision)
    with torch.autocast(device.type, half, cache_enabled=False) if half else contextlib.nullcontext():
        yield


def with_storage(model: nn.Module, device: torch.device) -> nn.Module:
    """A model that was built on the meta device, on another one, with undefined values; what was shared stays shared.

    Args:
        model: changed in place.
        device: of the result.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old tensor, so that no other one gets its id

    def on_device(old: Tensor) -> Tensor:
        if id(old) not in made:
            new = torch.empty(old.shape, dtype=old.dtype, device=device)
            made[id(old)] = old, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        return made[id(old)][1]

    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
        for held in places:
            for name, value in held.items():
                if isinstance(value, Tensor):
                    held[name] = on_device(value)
    return model


def estimate(
    build: Callable[[], nn.Module],
    rehearse: Callable[[nn.Module], Callable[[], Tensor]],
    optimizer: Callable[[nn.Module], Optimizer],
    device: torch.device,
    *,
    precision: str = "32-true",
    checkpointing: bool = False,
    copies: int = 0,
    processes: int = 1,
    whole: bool = False,
) -> Estimate:
    """The memory of one training step.

    Of layers that repeat only two are run; see :mod:`attnlab.training.stand_ins`.

    Args:
        build: makes the model; called with torch's default device meta.
        rehearse: gives a function that computes the loss of the model's largest batch; called with torch's default
            device `device`.
        optimizer: makes the optimizer of a model.
        device: of the run. Kernels are chosen as on it; it need not be there.
        precision: `hardware.precision`.
        checkpointing: `hardware.gradient_checkpointing`.
        copies: of the weights, besides the model's own.
        processes: of the run.
        whole: run every layer.
    """
    with without_memory():
        model = build()
        if precision == "bf16-true":
            model.to(torch.bfloat16)
    alive = LiveTensors()
    with FakeTensorMode(), alive:
        model = with_storage(model, device).train()
        weights = size_of([*model.parameters(), *model.buffers()])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own_switch = checkpointing and not checkpoint_layers(model)  # then layers are called inside of checkpoints
        repeated = None if whole or own_switch else StandIns(model, alive)
        pairs = [] if repeated is None else list(repeated.parameters())
        made, left_out = optimizer(model), {id(parameter) for parameter, _ in pairs}
        for group in made.param_groups:  # the fused kernel that a CUDA device takes has no temporaries
            group.update({name: False for name in ("foreach", "fused") if name in group})
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in left_out]
        with torch.device(device):
            loss = rehearse(model)
        for parameter in trained:  # from the second step on there are gradients and a state in the forward pass, too
            parameter.grad = torch.empty_like(parameter)
        made.step()
        alike = sum(_state_of(made, twin) for _, twin in pairs)
        state = alike + sum(_state_of(made, parameter) for parameter in trained)
        held = torch.empty(alike, dtype=torch.uint8, device=device)
        alive.peak = alive.live
        one_step(loss, made, device, precision, model.zero_grad)
        del held
    gradients = size_of(trained)
    rest = alive.peak - weights - gradients - state
    return Estimate(weights * (1 + copies), gradients * (2 if processes > 1 else 1), state, rest)


def one_step(
    loss: Callable[[], Tensor],
    optimizer: Optimizer,
    device: torch.device,
    precision: str,
    zero_grad: Callable[[], None] | None = None,
) -> None:
    """A training step in the trainer's order: the gradients of the step before are there in the forward pass.

    Args:
        loss: computes the loss.
        optimizer: of the model.
        device: of the run.
        precision: `hardware.precision`.
        zero_grad: removes all gradients; None: the optimizer has all parameters.
    """
    with computing_in(device, precision):
        value = loss()
    (zero_grad or optimizer.zero_grad)()
    value.backward()
    optimizer.step()


def _state_of(optimizer: Optimizer, parameter: nn.Parameter) -> int:
    """Bytes of an optimizer's state of a parameter."""
    held = optimizer.state[parameter].values() if parameter in optimizer.state else ()
    return size_of(value for value in held if isinstance(value, Tensor))


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of some tensors.

    Args:
        tensors: each once.
    """
    return sum(x.numel() * x.itemsize for x in tensors)


def refusal(found: Estimate, free: int, where: str, keys: Mapping[str, str]) -> str | None:
    """What to say where a run cannot fit the memory that is free; None where it may.

    Args:
        found: what the run needs.
        free: bytes.
        where: the device's name.
        keys: what may be lowered or set -> what that does.
    """
    if found.total <= TOLERANCE * free:
        return None
    least = found.weights + found.gradients + found.optimizer
    advice = ", ".join(f"{key} ({effect})" for key, effect in keys.items())
    if least > free:
        advice = "without any batch it is too much already: take a smaller model, or hardware=fsdp on several GPUs"
    else:
        advice = f"set {advice}"
    return f"the run needs about {found}, and {where} has {free / GIB:.2f} GiB free: {advice}"


TOLERANCE = 1.1  # an estimate is refused when it is more than so many times what is free
