"""The engines of h200.py: their models, their arguments by name, and a keeper that starts many of them at once."""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from alignment_tests.plugin import laws
from minitransformer.checkpoint_files import replacing_directory, write_json, write_sharded
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.layout import pieces
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.nvfp4_config import quantisation_files
from minitransformer.models.qwen3_moe.nvfp4_layout import MODELOPT
from minitransformer.models.qwen3_moe.weights import CHECKPOINT_FILES
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.launch import Server

TINY = dict(vocab_size=1024, hidden_size=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64,
            intermediate_size=512, expert_size=128, num_experts=8, top_k=2)  # fmt: skip
DEMO = dict(vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
            intermediate_size=1536, expert_size=1536, num_experts=4, top_k=2, tie_word_embeddings=True)  # fmt: skip
WIDE = dict(vocab_size=151936, hidden_size=2048, num_layers=4, num_heads=32, num_kv_heads=4, head_dim=128,
            intermediate_size=6144, expert_size=768, num_experts=128, top_k=8)  # fmt: skip
SIZES = {"tiny": TINY, "demo": DEMO, "wide": WIDE}
COMMON = ["--random-seed", "1", "--mem-fraction-static", "0.9", "--sleep-on-idle"]
EXPERTS = ["--enable-return-routed-experts", "--decode-log-interval", "1"]
RECIPE = ["--json-model-override-args", '{"minitransformer_recipe": "nvfp4_per_token"}']
STOCK = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton",
         "--cuda-graph-backend-prefill", "disabled"]  # fmt: skip
OWN = ["--cuda-graph-bs-prefill", "1024", "8192"]  # of its 58 sizes those that benchmarks/sglang_speed.py meets
VARIANTS = {"chunk16": ["--chunked-prefill-size", "16"], "chunk64": ["--chunked-prefill-size", "64"],
            "page16": ["--page-size", "16"], "mixed": ["--enable-mixed-chunk"], "twin": [],
            "small": ["--max-total-tokens", "300", "--schedule-conservativeness", "0.1"],
            "tight": ["--max-total-tokens", "3100", "--schedule-conservativeness", "0.1"]}  # fmt: skip
KINDS = {"bf16": [], "packed": [], "nvfp4": RECIPE, "stock": STOCK,
         "deterministic": [*STOCK, "--enable-deterministic-inference"],
         "own": OWN, "owndeterministic": [*OWN, "--enable-deterministic-inference"]}  # fmt: skip
OWN_CHOICES = ("attention_backend", "sampling_backend", "moe_runner_backend", "cuda_graph_config")


def empty(sizes: dict) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        norm_topk_prob=True, sparse_layers=(True,) * sizes["num_layers"], rms_eps=1e-6, rope_theta=1e6,
        max_positions=4096, **{"tie_word_embeddings": False} | sizes,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def drawn(model: Qwen3MoeForCausalLM, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Its parameters' names and random values of the size 1 / sqrt(fan-in), drawn on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator(device).manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=rng, device=device, dtype=torch.bfloat16)
        yield name, noise.mul_(0.1).add_(1) if "norm" in name else noise.mul_(p.shape[-1] ** -0.5)


@torch.no_grad()
def made(sizes: dict, seed: int = 0) -> Qwen3MoeForCausalLM:
    model = empty(sizes).to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    parameters = dict(model.named_parameters())
    for name, values in drawn(model, seed):
        parameters[name].copy_(values)
    return model


def learners(args: argparse.Namespace, name: str) -> Qwen3MoeForCausalLM:
    """The model of these engines: of random weights, or what a directory that is not made here holds."""
    if name in SIZES:
        return made(sizes_of(args, name))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Qwen3MoeForCausalLM.from_pretrained(args.directory / name, device=device)


def write(directory: Path, sizes: dict, seed: int = 0) -> None:
    """The checkpoint of `made`; a few parameters are in memory at a time."""
    model, places = empty(sizes), {}
    for piece in pieces(model.config):
        places.setdefault(piece.parameter, []).append(piece)
    named = ((piece.key, values[piece.index]) for name, values in drawn(model, seed) for piece in places[name])
    with replacing_directory(directory, CHECKPOINT_FILES) as new:
        write_json(new / "config.json", model.config.to_hf())
        write_sharded(new, named, 4 * 10**9)


def write_bare(directory: Path, sizes: dict, packed: bool) -> None:
    """config.json alone, for an engine that waits for a learner's weights."""
    hf = (config := empty(sizes).config).to_hf()
    if packed:
        hf["quantization_config"] = quantisation_files(MODELOPT, "nvfp4_per_token", config, [])[0]
    with replacing_directory(directory, CHECKPOINT_FILES) as new:
        write_json(new / "config.json", hf)


def sizes_of(args: argparse.Namespace, name: str) -> dict:
    return SIZES[name] | ({"num_layers": args.layers} if name == "wide" else {})


def arguments(args: argparse.Namespace, name: str) -> tuple[str, list[str], bool]:
    """An engine's name -> (checkpoint, its arguments, whether it is stock)."""
    size, kind, *rest = name.split("-")
    stock = kind in ("stock", "deterministic", "own", "owndeterministic")
    # More than a batch: a prompt that is cut counts twice, so the last of a batch would run alone.
    most = str(max(args.batches) + 8)
    more = [*COMMON, "--context-length", str(args.context), "--max-total-tokens", str(args.tokens)]
    more += ["--max-running-requests", most, *KINDS[kind]]
    if "graphs" in rest and not args.cpu:
        more += ["--cuda-graph-backend-decode", "full", "--cuda-graph-bs-decode", *map(str, args.batches)]
    elif "default" not in rest:  # SGLang's own choice
        more += ["--cuda-graph-backend-decode", "disabled"]
    more += [x for word in rest for x in VARIANTS.get(word, [])]
    size += (".packed" if kind == "packed" else "") + (".bare" if "bare" in rest else "")
    more += ["--load-format", "dummy"] if "bare" in rest else []
    return size, more + (EXPERTS if args.experts and not stock else []), stock


def keep(args: argparse.Namespace) -> int:
    """Each engine in a thread of its own, which must live as long as it (launch._end_with_parent)."""
    stop = args.directory / "stop"

    def run(name: str) -> None:
        size, more, stock = arguments(args, name)
        began, url = time.monotonic(), args.directory / f"{name}.url"
        try:
            with Server(args.directory / size, more, cpu=args.cpu, stock=stock, timeout=args.timeout) as server:
                print(f"{name}: up in {time.monotonic() - began:.1f} s; {' '.join(more)}; {server.log}", flush=True)
                if not stock:
                    assert "miniTransformer is live" in server.log.read_text("utf-8", "replace"), server.log
                else:
                    told = Client(server.url).about()
                    print(f"{name}: { {field: told.get(field) for field in OWN_CHOICES} }", flush=True)
                if args.warm:
                    warm(args, Client(server.url))
                    print(f"{name}: warm after {time.monotonic() - began:.1f} s", flush=True)
                partial = url.with_suffix(".new")
                partial.write_text(json.dumps({"url": server.url, "log": str(server.log), "group": server.process.pid}))
                partial.rename(url)
                while not stop.exists() and server.process.poll() is None and time.monotonic() < began + args.lifetime:
                    time.sleep(0.5)
        except Exception as error:  # one engine that fails must not take the others along
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            url.write_text(json.dumps({"error": str(error)}))

    threads = [Thread(target=run, args=(name,)) for name in args.names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


def warm(args: argparse.Namespace, client: Client) -> None:
    """Compiles what the measured batches will call."""
    for batch in args.batches:
        laws.run(client, laws.prompts([args.input] * batch, 1000, batch), 1.0, 4, first=-1)


def connect(args: argparse.Namespace, name: str) -> tuple[Client, str]:
    """A kept engine -> (its client, what its log says so far)."""
    path, end = args.directory / f"{name}.url", time.monotonic() + args.timeout
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{name} is not up after {args.timeout:g} s; is it kept?")
        time.sleep(0.5)
    found = json.loads(path.read_text())
    if "error" in found:
        raise RuntimeError(found["error"])
    return Client(found["url"]), Path(found["log"]).read_text("utf-8", "replace")


def add_row(args: argparse.Namespace, **found) -> None:
    """One line of JSON more in --json, and what it was measured on."""
    if args.json is not None:
        if found.get("engine", "").startswith("wide"):
            found["layers"] = args.layers
        found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        found["date"] = time.strftime("%Y-%m-%d")
        with args.json.open("a") as file:
            file.write(json.dumps(found) + "\n")
