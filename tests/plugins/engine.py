"""Runs an exported folder in vLLM: `python engine.py FOLDER` reads its asked.json and writes answer.json there."""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from attnlab.export.engine import cache_of, request_of


def main(folder: Path) -> None:
    asked = json.loads((folder / "asked.json").read_text())
    answer: dict[str, Any] = {"requests": [], "preempted": 0}
    preempt = Scheduler._preempt_request

    def counted(*request: Any, **options: Any) -> Any:
        answer["preempted"] += 1
        return preempt(*request, **options)

    Scheduler._preempt_request = counted
    llm = LLM(str(folder), skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=8, **asked["engine"])
    how = SamplingParams(temperature=0, max_tokens=asked["new"], ignore_eos=True, detokenize=False, logprobs=0)
    for _ in range(2):
        for request in llm.generate([{"prompt_token_ids": tokens} for tokens in asked["prompts"]], how, use_tqdm=False):
            made = request.outputs[0]
            chosen = [entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)]
            answer["requests"].append([list(made.token_ids), chosen, request.num_cached_tokens])
    _, answer["bytes_per_position"], _ = cache_of(llm)
    answer["request"] = request_of(llm, max(asked["prompts"], key=len))
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
