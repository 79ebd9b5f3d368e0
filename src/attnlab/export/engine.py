"""Run by the Python of a serving engine, alone: vLLM decodes a folder, and an answer is written.

    python engine.py QUESTION.json ANSWER.json

The question has the folder, the arguments of `vllm.LLM`, prompts of token ids, the number of new tokens, and the
prompts with the tokens that another program chose, whose log-probabilities are asked for. With numbers of requests in
place of the prompts, so many at once are timed.
"""

import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the cache is measured in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def cache_of(llm):  # type: ignore[no-untyped-def]
    """Bytes of all caches, each counted once, bytes of a token in pages that stay, and positions of a full page.

    Pages of newest positions are freed behind them. The engine must run in this process.
    """
    core, tensors = llm.llm_engine.engine_core.engine_core, {}
    for layer in core.vllm_config.compilation_config.static_forward_context.values():
        storage = layer.kv_cache.untyped_storage()
        tensors[storage.data_ptr()] = storage.nbytes()
    pages = core.scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in pages.kv_cache_groups]
    stay = [spec.block_size for spec in specs if getattr(spec, "sliding_window", None) is None]
    size = max(stay) if stay else max(specs, key=lambda spec: (spec.head_size, -spec.block_size)).block_size
    total = sum(tensors.values())
    return total, total / (pages.num_blocks * size) if stay else 0.0, size


def request_of(llm, ids):  # type: ignore[no-untyped-def]
    """Positions and bytes of one request when its last token is decoded. The engine must run in this process."""
    from vllm import SamplingParams

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager, pages = scheduler.kv_cache_manager, scheduler.kv_cache_config.num_blocks
    allocate, last = manager.allocate_slots, [0, 0]

    def counted(request, new, *others, **named):  # type: ignore[no-untyped-def]
        result = allocate(request, new, *others, **named)
        last[:] = request.num_computed_tokens + new, pages - 1 - manager.block_pool.get_num_free_blocks()
        return result

    manager.allocate_slots = counted
    llm.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    manager.allocate_slots = allocate
    return last[0], last[1] * cache_of(llm)[0] / pages


def loaded(asked, arguments):  # type: ignore[no-untyped-def]
    """Time requests of random tokens, so many at once, and tell how many fit into the cache."""
    from vllm import LLM, SamplingParams

    new, length, counts = asked["tokens"], asked["length"], asked["requests"]
    llm = LLM(
        asked["folder"],
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_num_seqs=max(counts),
        kv_cache_memory_bytes=asked["cache_bytes"],
        **arguments,
    )
    scheduler, drawn = llm.llm_engine.engine_core.engine_core.scheduler, random.Random(1)
    schedule, steps = scheduler.schedule, []

    def watched(*given, **named):  # type: ignore[no-untyped-def]
        planned = schedule(*given, **named)
        steps.append((time.perf_counter(), len(planned.num_scheduled_tokens), planned.total_num_scheduled_tokens))
        return planned

    def prompt(size):  # type: ignore[no-untyped-def]
        return [drawn.randrange(asked["ids"]) for _ in range(size)]

    pages, (_, of_request) = scheduler.kv_cache_config.num_blocks, request_of(llm, prompt(length - 1))
    total, rows = cache_of(llm)[0], []
    how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    scheduler.schedule = watched
    for count in counts:
        llm.reset_prefix_cache()
        steps.clear()
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt(length - new)} for _ in range(count)], how, use_tqdm=True)
        end = time.perf_counter()
        times = [*(step[0] for step in steps[1:]), end]
        alone = [(then - now, many) for (now, many, tokens), then in zip(steps, times, strict=True) if many == tokens]
        rows.append(
            {
                "requests": count,
                "at_once": max(many for _, many, _ in steps),
                "tokens_per_second": count * new / (end - begin),
                "decoding_tokens_per_second": sum(many for _, many in alone) / sum(seconds for seconds, _ in alone),
            }
        )
    return {"fit": int((pages - 1) / pages * total // of_request), "request_bytes": of_request, "rows": rows}


def decoded(asked, arguments):  # type: ignore[no-untyped-def]
    """Decode all prompts together, some of them again from the prefix cache, and one alone; then score given tokens."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        asked["folder"],
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=asked["chunk"],
        max_num_seqs=min(64, asked["chunk"]),
        **arguments,
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False, allowed_token_ids=asked["allowed"]
    )

    def decode(prompts):  # type: ignore[no-untyped-def]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=True)
        return [list(output.outputs[0].token_ids) for output in outputs], outputs

    begin = time.perf_counter()
    tokens, _ = decode(asked["prompts"])
    seconds = time.perf_counter() - begin
    again, outputs = decode(asked["prompts"][: asked["again"]])
    alone = [decode([ids])[0][0] for ids in asked["prompts"][: asked["alone"]]]

    llm.reset_prefix_cache()
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    given = llm.generate([{"prompt_token_ids": ids} for ids in asked["given"]], scored, use_tqdm=True)
    scores = [
        [
            (place[token].logprob, place[token].rank)
            for token, place in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        for ids, output in zip(asked["given"], given, strict=True)
    ]
    config = llm.llm_engine.vllm_config
    _, of_token, size = cache_of(llm)
    length, of_request = request_of(llm, max(asked["prompts"], key=len))
    attention = next(iter(config.compilation_config.static_forward_context.values()))
    backend = attention.get_attn_backend()
    return {
        "version": vllm.__version__,
        "backend": backend.get_name(),
        "model": type(llm.llm_engine.model_executor.driver_worker.worker.model_runner.model).__name__,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "tokens": tokens,
        "again": again,
        "alone": alone,
        "reused": sum(output.num_cached_tokens or 0 for output in outputs),
        "scores": scores,
        "cache_bytes_per_token": of_token,
        "block": size,
        "request_positions": length,
        "request_bytes": of_request,
        "seconds": seconds,
    }


def main(question: str, answer: str) -> None:
    """Answer the question in a file."""
    import torch

    with open(question, encoding="utf-8") as file:
        asked = json.load(file)
    arguments = asked["options"]
    if not torch.cuda.is_available():
        arguments |= asked["cpu"] | {"enforce_eager": True}
    result = (loaded if "requests" in asked else decoded)(asked, arguments)
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
