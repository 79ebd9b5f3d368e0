"""How much of a run is matrix products, as torch's profiler tells."""

from collections.abc import Callable

from torch.autograd.profiler_legacy import profile  # torch.profiler writes lines to the terminal at each start and stop

PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "dot",
        "_scaled_dot_product_flash_attention_for_cpu", "mkldnn_linear",
    )
)  # fmt: skip


def product_seconds(run: Callable[[], None]) -> float:
    """Seconds of the thread that runs it in matrix products and in fused attention, which is made of them.

    The profiler adds about a microsecond to each product, and makes what is between the products slower: take the run's
    own time without it.

    Args:
        run: on a CPU.
    """
    with profile() as found:
        run()
    return sum(event.self_cpu_time_total for event in found.key_averages() if event.key in PRODUCTS) / 1e6
