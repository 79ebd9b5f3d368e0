"""Time the questions of six tasks in attnlab and in lm-evaluation-harness's own class for models of transformers.

HF_HUB_OFFLINE=1 python experiments/peers/questions.py MODEL BENCHMARKS LIMIT [float32]

MODEL is a folder of transformers, BENCHMARKS has the data of `experiment=convert/evaluation`, and LIMIT is the number
of questions of each task. Both compute under bfloat16 autocast, or in float32, in one process, task by task, and the
one that begins alternates. A row for each task is added to questions.csv.
"""

import csv
import sys
import time
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from attnlab.config.check import check
from attnlab.run.loading import load
from attnlab.tasks.base import Restores, task_of
from attnlab.tasks.harness import LIGHTEVAL, TrainedRun

BATCH = 16
COLUMNS = [
    "Task",
    "Questions",
    "Type",
    "attnlab, s",
    "transformers, s",
    "Ratio",
    "attnlab, accuracy",
    "transformers, accuracy",
]
FILE = Path(__file__).parent / "questions.csv"


def main(model: str, benchmarks: str, limit: int, dtype: str = "bfloat16") -> None:
    half = None if dtype == "float32" else torch.bfloat16
    words = ["mode=evaluate", "experiment=convert/evaluation", f"model={model}", "hardware=cpu"]
    cfg = check([*words, f"task.evaluation.folder={benchmarks}"], load).jobs[0]
    own = TrainedRun(task_of(cfg, Restores).restore(), BATCH, half)
    other = HFLM(model, device="cpu", batch_size=BATCH, mixed_precision_dtype=half, dtype="float32")
    manager = TaskManager(include_path=[str(LIGHTEVAL), benchmarks], include_defaults=False)
    models: dict[str, Any] = {"attnlab": own, "transformers": other}
    rows = []
    with chdir(benchmarks):
        for number, name in enumerate(cfg.task.evaluation.tasks):
            seconds, scores = dict[str, float](), dict[str, float]()
            for key in sorted(models, reverse=bool(number % 2)):
                began = time.perf_counter()
                results = simple_evaluate(
                    models[key], tasks=[name], task_manager=manager, log_samples=False, limit=limit, bootstrap_iters=0
                )
                seconds[key] = time.perf_counter() - began
                scores[key] = results["results"][name]["acc,none"]
            ratio = seconds["attnlab"] / seconds["transformers"]
            times = [round(seconds[key], 1) for key in models]
            rows.append([name, limit, dtype, *times, round(ratio, 2), *(scores[key] for key in models)])
            print(rows[-1], flush=True)
    new = not FILE.is_file()
    with FILE.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS] * new + rows)


if __name__ == "__main__":
    main(sys.argv[1], str(Path(sys.argv[2]).resolve()), int(sys.argv[3]), *sys.argv[4:])
