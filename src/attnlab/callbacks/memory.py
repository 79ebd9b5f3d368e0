"""Memory while something runs: peak and mean."""

import threading
from types import TracebackType

import psutil
import torch


class MemoryMeter:
    """Memory in MiB between enter and exit: `peak`, `mean`, and `protocol`, which says what was read.

    CUDA: the allocator's bytes.  CPU: the process's resident set, read every 50 ms, the state before included.
    """

    def __init__(self, device: torch.device, interval: float = 0.05) -> None:
        self.device, self.interval = device, interval
        self.peak = self.mean = 0.0
        where = "CUDA allocator" if device.type == "cuda" else "resident set of the process"
        self.protocol = f"{where}, read every {1000 * interval:.0f} ms"
        self._readings: list[int] = []
        self._stop = threading.Event()

    def _read(self) -> int:
        return (
            torch.cuda.memory_allocated(self.device)
            if self.device.type == "cuda"
            else psutil.Process().memory_info().rss
        )

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            self._readings.append(self._read())

    def __enter__(self) -> "MemoryMeter":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._readings = [self._read()]
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._readings.append(self._read())
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else max(self._readings)
        self.peak = peak / 2**20
        self.mean = sum(self._readings) / len(self._readings) / 2**20
