"""attention on the GPU, prefill and decode: bits first, then every schedule's time, against PyTorch's SDPA.

A decode step reads other keys in each layer, so calls take turns over several stores of keys and values, ours and the
library's: with one store, what the call before has left in the L2 cache would be read from there. `same_ms` and
`same_torch_ms` are the times with one store, `in_order_ms` is ours where pages lie in order, as the library's keys do.
"""

from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_bench.products import best, differing, schedules
from gpu_bench.timing import copies, medians_ms
from minitransformer.batch import Batch
from minitransformer.ops import attention, gpu

BF16 = torch.bfloat16
HEADS, KV_HEADS, WIDTH, PAGE = 32, 4, 128, 16
RANDOM = 8  # queries of each sequence that are held to the CPU reference
STORES = 3  # of keys and values at least, where decode is timed
PREFILL = ((4, 4096), (2, 8192), (1, 16384))
DECODE = (
    (1, 1024), (1, 8192), (1, 32768), (4, 1024), (4, 8192), (4, 32768), (16, 1024), (16, 8192), (16, 32768),
    (64, 1024), (64, 8192), (64, 32768), (256, 1024), (256, 8192), (256, 32768),
)  # fmt: skip


def _paged(sequences: int, length: int, queries: int, shuffled: bool = True) -> tuple[Batch, int]:
    """Each sequence's last `queries` tokens over pages -> (batch, rows of the store)."""
    pages = -(-length // PAGE)
    order = torch.randperm(sequences * pages) if shuffled else torch.arange(sequences * pages)
    tables = order.view(sequences, pages).tolist()
    batch = Batch.paged([[0] * queries] * sequences, [length - queries] * sequences, tables, PAGE)
    return batch, sequences * pages * PAGE


def _check(o, q, k, v, batch: Batch) -> tuple[int, int]:
    """(elements, outputs compared): those of some queries that differ from the CPU reference.

    The last query of the first, the last and two random sequences; of many queries RANDOM more of each sequence.
    """
    wrong, compared, sequences = 0, 0, len(batch.kv_lens)
    some = {0, sequences - 1, *torch.randint(sequences, (2,)).tolist()}
    for s in range(sequences):
        begin, end = batch.cu_seqlens[s], batch.cu_seqlens[s + 1]
        queries = {end - 1} if s in some else set()
        queries |= set(torch.randint(begin, end, (RANDOM,)).tolist()) if end - begin > 1 else set()
        for t in sorted(queries):
            rows = batch.key_rows_SL[s, : batch.kv_lens[s] - (end - 1 - t)]
            one = Batch.paged([[0]], [len(rows) - 1], [list(range(len(rows)))], 1)
            want = attention.forward(q[t : t + 1].cpu(), k[rows].cpu(), v[rows].cpu(), one)[0]
            wrong, compared = wrong + differing(o[t : t + 1].cpu(), want), compared + want.numel()
    return wrong, compared


def _theirs(q, k, v, backend: SDPBackend, causal: bool):
    """The library's call on [S, heads, n, H] tensors, with grouped heads if it takes them; None if it refuses."""

    def call():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    try:
        call()
    except RuntimeError as error:
        print(f"  {backend} refuses: {str(error)[:100]}")
        return None
    return call


def _measure(batch: Batch, q, stores: list[tuple], peers: dict[str, list], in_order: Batch | None = None) -> dict:
    """stores: keys and values. peers: a library's name -> its calls, one a store. in_order: with other pages."""
    on = batch.to("cuda")
    o = attention.forward(q, *stores[0], on)[0]
    longest = max(b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False))
    tiles = [s for s in gpu.attention.CANDIDATES if gpu.attention.fits(s, longest, HEADS // KV_HEADS, WIDTH)]
    tiles = [s for s in tiles if isinstance(s, gpu.attention.Prefill) == (longest > 1)]
    times = schedules(
        tiles,
        lambda s: gpu.attention.forward(q, *stores[0], on, s)[0],
        o,
        lambda s: [lambda kv=kv: gpu.attention.forward(q, *kv, on, s) for kv in stores],
    )
    ours = [x.to("cuda") for x in (batch, in_order) if x]
    calls = [[lambda kv=kv, x=x: attention.forward(q, *kv, x) for kv in stores] for x in ours] + [*peers.values()]
    ms, *theirs = medians_ms(calls)
    ordered, theirs = theirs[: len(ours) - 1], theirs[len(ours) - 1 :]
    wrong, compared = _check(o, q, *stores[0], batch)
    if in_order:
        more = _check(calls[1][0]()[0], q, *stores[0], in_order)
        wrong, compared = wrong + more[0], compared + more[1]
    row = {"op": "attention", "wrong": wrong, "compared": compared, "ms": ms, "best": best(times), "schedules": times,
           "torch": dict(zip(peers, theirs, strict=True)), "torch_ms": min(theirs, default=float("nan"))}  # fmt: skip
    if len(stores) > 1:
        row |= {"stores": len(stores), "in_order_ms": ordered[0] if ordered else None}
        row["same_ms"], *theirs = medians_ms([calls[0][:1], *(call[:1] for call in peers.values())])
        row["same_torch_ms"] = min(theirs, default=float("nan"))
    return row


def prefill(shapes=PREFILL) -> Iterator[dict]:
    for S, n in shapes:
        q = torch.randn(S * n, HEADS, WIDTH, device="cuda", dtype=BF16)
        k, v = (torch.randn(S * n, KV_HEADS, WIDTH, device="cuda", dtype=BF16) for _ in range(2))
        split = [x.view(S, n, -1, WIDTH).transpose(1, 2) for x in (q, k, v)]
        flops = 4 * HEADS * WIDTH * S * n * (n + 1) / 2
        backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
        peers = {one.name: [call] for one in backends if (call := _theirs(*split, one, True))}
        for kind in ("packed", "paged"):
            batch = Batch.packed([[0] * n] * S) if kind == "packed" else _paged(S, n, n)[0]
            row = _measure(batch, q, [(k, v)], peers)
            yield row | {"shape": f"prefill {kind}", "M": f"{S} x {n}", "tflops": 1e-9 * flops / row["ms"]}


def decode(shapes=DECODE) -> Iterator[dict]:
    for S, n in shapes:
        batch, rows = _paged(S, n, 1)
        q = torch.randn(S, HEADS, WIDTH, device="cuda", dtype=BF16)
        count = max(STORES, copies(4 * rows * KV_HEADS * WIDTH))
        shape = rows, KV_HEADS, WIDTH
        stores = [[torch.randn(shape, device="cuda", dtype=BF16) for _ in range(2)] for _ in range(count)]
        calls = []
        for store in stores:
            k, v = (x[: S * n].view(S, n, -1, WIDTH).transpose(1, 2) for x in store)
            calls.append(_theirs(q[:, :, None], k, v, SDPBackend.FLASH_ATTENTION, False))
        row = _measure(batch, q, stores, {"flash": calls} if all(calls) else {}, _paged(S, n, 1, False)[0])
        yield row | {"shape": "decode", "M": f"{S} x {n}", "tb_s": 4e-9 * S * n * KV_HEADS * WIDTH / row["ms"]}
        del stores, calls
