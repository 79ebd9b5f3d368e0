"""Runs an exported folder in vLLM: `python engine.py FOLDER`, with asked.json in it; writes answer.json beside that."""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler


def main(folder: Path) -> None:
    asked = json.loads((folder / "asked.json").read_text())
    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self, request, *more, **options):  # type: ignore[no-untyped-def]
        preempted.append(request.request_id)
        return preempt(self, request, *more, **options)

    Scheduler._preempt_request = counted
    llm = LLM(str(folder), skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=8, **asked["engine"])
    how = SamplingParams(temperature=0, max_tokens=asked["new"], ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    answer = []
    for _ in range(asked["passes"]):
        for request in llm.generate(prompts, how, use_tqdm=False):
            made = request.outputs[0]
            chosen = [entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)]
            answer.append([list(made.token_ids), chosen, request.num_cached_tokens])
    core = llm.llm_engine.engine_core.engine_core
    pages = core.scheduler.kv_cache_config.num_blocks
    layers = core.vllm_config.compilation_config.static_forward_context.values()
    positions = pages * core.vllm_config.cache_config.block_size
    result = {
        "requests": answer,
        "preempted": len(preempted),
        "bytes_per_position": sum(layer.kv_cache.nbytes for layer in layers) / positions,
    }
    (folder / "answer.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
