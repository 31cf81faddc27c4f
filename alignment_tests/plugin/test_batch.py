"""SGLang's batches as ours: rows of the pool, chunks and decode, and a decode step padded as a CUDA graph has it.

No SGLang is needed: of it the module under test imports a base class alone.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.plugin import engines, laws
from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe.layers import no_trace
from minitransformer.plugins.sglang.prefill_graphs import SIZES, needed

NAME = "sglang.srt.layers.attention.base_attn_backend"
BASE = ModuleType(NAME)
BASE.AttentionBackend = object
PARENTS = {NAME.rsplit(".", n)[0]: ModuleType(NAME.rsplit(".", n)[0]) for n in range(1, 5)}
with patch.dict(sys.modules, PARENTS | {NAME: BASE}):
    from minitransformer.plugins.sglang import arguments
    from minitransformer.plugins.sglang import batch as ours
    from minitransformer.plugins.sglang.batch import AttentionBackend, Pool

ROWS, CONTEXT = 64, 24


class Mode(SimpleNamespace):
    def is_decode(self) -> bool:
        return self.kind == "decode"

    def is_extend(self) -> bool:
        return self.kind == "extend"

    def is_idle(self) -> bool:
        return self.kind == "idle"


@pytest.fixture
def model():
    return engines.tiny(max_positions=CONTEXT)


@pytest.fixture
def backend(model):
    """A pool whose rows are handed out in random order; what nobody has written is NaN, but row 0 is padding's."""
    shape = (ROWS, model.config.num_kv_heads, model.config.head_dim)
    k, v = ([torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in model.layers] for _ in range(2))
    for tensor in (*k, *v):
        tensor[0] = 0
    order = 1 + torch.randperm(ROWS - 1, generator=torch.Generator().manual_seed(3))
    table = torch.zeros(8, CONTEXT, dtype=torch.int32)
    for request, rows in ((1, order[:12]), (5, order[12:20]), (2, order[20:41])):
        table[request, : len(rows)] = rows.int()
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=SimpleNamespace(k_buffer=k, v_buffer=v)
    )
    return AttentionBackend(runner)


REQUESTS, LENGTHS = [1, 5, 2], [11, 7, 20]


def extend(backend, ids, starts, ends):
    """SGLang's batch of the positions starts[s] .. ends[s] of each request."""
    table = backend.req_to_token_pool.req_to_token
    spans = list(zip(REQUESTS, ids, starts, ends, strict=True))
    return SimpleNamespace(
        forward_mode=Mode(kind="extend"), batch_size=3, req_pool_indices=torch.tensor(REQUESTS),
        seq_lens=torch.tensor(ends), seq_lens_cpu=torch.tensor(ends),
        extend_seq_lens_cpu=[b - a for a, b in zip(starts, ends, strict=True)],
        input_ids=torch.tensor([i for _, row, a, b in spans for i in row[a:b]]),
        positions=torch.cat([torch.arange(a, b) for a, b in zip(starts, ends, strict=True)]),
        out_cache_loc=torch.cat([table[r, a:b] for r, _, a, b in spans]),
    )  # fmt: skip


def logits(model, backend):
    with torch.no_grad():
        return model.logits(model.hidden(backend.batch, Pool(backend.token_to_kv_pool)))


def test_chunks_and_decode_are_one_packed_pass(model, backend):
    ids = laws.prompts([n + 1 for n in LENGTHS], engines.VOCAB)
    with torch.no_grad():
        want = model(Batch.packed(ids)).split([n + 1 for n in LENGTHS])
    middle = [4, 7, 1]
    backend.init_forward_metadata(extend(backend, ids, [0, 0, 0], middle))
    assert_bits_equal(logits(model, backend), torch.cat([w[:m] for w, m in zip(want, middle, strict=True)]), "chunk 1")
    backend.init_forward_metadata(extend(backend, [i for i in ids], [4, 6, 1], LENGTHS))
    got = logits(model, backend).split([7, 1, 19])
    for s, start in enumerate((4, 6, 1)):
        assert_bits_equal(got[s], want[s][start : LENGTHS[s]], f"chunk 2 of request {s}")
    assert_bits_equal(decode(model, backend, ids, 0), torch.stack([w[-1] for w in want]), "decode")
    for padding in (0, 1, 5):
        got = decode(model, backend, ids, padding, graph=True)[:3]
        assert_bits_equal(got, torch.stack([w[-1] for w in want]), f"decode padded by {padding}")


def decode(model, backend, ids, padding: int, graph: bool = False):
    """One decode step; with padding rows as SGLang's graph runner makes them: request 0, length 1."""
    table, lens = backend.req_to_token_pool.req_to_token, [n + 1 for n in LENGTHS]
    rows = [int(table[r, n]) for r, n in zip(REQUESTS, LENGTHS, strict=True)]
    unused = sorted(set(range(ROWS)) - set(table.flatten().tolist()))  # the CPU takes no row for two tokens
    batch = SimpleNamespace(
        forward_mode=Mode(kind="decode"), batch_size=3 + padding,
        req_pool_indices=torch.tensor(REQUESTS + [0] * padding),
        seq_lens=torch.tensor(lens + [1] * padding), seq_lens_cpu=torch.tensor(lens + [1] * padding),
        input_ids=torch.tensor([row[-1] for row in ids] + [0] * padding),
        positions=torch.tensor(LENGTHS + [0] * padding),
        out_cache_loc=torch.tensor(rows + [0, *unused][:padding]),
    )  # fmt: skip
    if graph:
        backend.init_cuda_graph_state(16, 16)
        backend.rows_SL.fill_(ROWS - 1)  # what an earlier step has left
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
    else:
        backend.init_forward_metadata(batch)
    return logits(model, backend)


def test_an_idle_step_has_no_batch(backend):
    backend.init_forward_metadata(SimpleNamespace(forward_mode=Mode(kind="idle")))
    assert backend.batch is None


def test_prefills_alone_are_asked_of_the_graphs(model, backend):
    """A decode step may be under capture."""
    ids = laws.prompts([n + 1 for n in LENGTHS], engines.VOCAB)
    step = extend(backend, ids, [0, 0, 0], LENGTHS)
    backend.init_forward_metadata(step)
    asked, replayed = [], torch.zeros(1)
    backend.prefills = SimpleNamespace(run=lambda batch: asked.append(batch) or replayed)
    with torch.no_grad():
        assert backend.hidden(model, step, no_trace) is replayed and asked == [backend.batch]
        want = model.hidden(backend.batch, Pool(backend.token_to_kv_pool))
        backend.prefills = SimpleNamespace(run=lambda batch: None)
        assert_bits_equal(backend.hidden(model, step, no_trace), want, "that no graph takes")
        backend.prefills = SimpleNamespace(run=asked.append)
        step.forward_mode.kind = "decode"
        assert_bits_equal(backend.hidden(model, step, no_trace), want, "decode")
    assert len(asked) == 1


class Arguments(SimpleNamespace):
    """SGLang's take no change once they are resolved."""

    def __setattr__(self, name: str, value: object) -> None:
        if "resolved" in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({}, [128, 256, 512]), ({"cuda_graph_bs_prefill": [200, 700]}, [200, 700]),
        ({"cuda_graph_max_bs_prefill": 300}, [128, 256]), ({"cuda_graph_backend_prefill": "disabled"}, None),
        ({"disable_prefill_cuda_graph": True}, None), ({"decode": "disabled"}, None),
    ],
)  # fmt: skip
def test_prefills_have_graphs_where_the_arguments_say_so(model, backend, monkeypatch, given, made):
    """SGLang's own of prefills are off in each case."""
    found, seen = [], []
    monkeypatch.setitem(sys.modules, "minitransformer.plugins.sglang.routed", SimpleNamespace(noting=lambda: "note"))
    monkeypatch.setattr(ours, "PrefillGraphs", lambda *args: found.append(args) or "graphs")
    monkeypatch.setattr(arguments, "check", lambda args: None)
    monkeypatch.setenv(arguments.CUMEM, "0")
    args = Arguments(
        device="cuda", disable_cuda_graph=False, enable_deterministic_inference=False, chunked_prefill_size=300,
        disable_prefill_cuda_graph=False, cuda_graph_backend_prefill=None, cuda_graph_bs_prefill=None,
        cuda_graph_max_bs_prefill=None, decode="full",
    )  # fmt: skip
    vars(args).update(given)

    def resolve(args):  # as SGLang's own __post_init__
        assert args.disable_prefill_cuda_graph
        args.cuda_graph_config = SimpleNamespace(decode=SimpleNamespace(backend=args.decode))
        args.resolved = True

    arguments.post_init(resolve, args)
    runner = SimpleNamespace(server_args=args, attn_backend=backend, model=SimpleNamespace(model=model))
    ours.with_prefills(lambda *given: seen.append(given), runner, True)
    assert seen == [(runner, True)] and backend.prefills == (None if made is None else "graphs")
    assert getattr(runner.model, "prefills", None) == backend.prefills
    if made is not None:
        ((model_, pool, *rest),) = found
        assert model_ is model and pool.k is backend.token_to_kv_pool.k_buffer and rest == [ROWS, made, "note"]


def test_experts_of_padding_are_not_told():
    """A buffer of SGLang's has the rows of a chunk; a graph may have more."""
    buffer, name = torch.zeros(3, 2, 2, dtype=torch.int32), "sglang.srt.state_capturer.routed_experts"
    capturer = SimpleNamespace(device_cache=SimpleNamespace(buffer=buffer))
    capturer.capture = lambda layer, ids: buffer[: len(ids), layer].copy_(ids)
    stub = ModuleType(name)
    stub.get_global_experts_capturer = lambda: capturer
    parents = {name.rsplit(".", n)[0]: ModuleType(name.rsplit(".", n)[0]) for n in range(1, 4)}
    ids = torch.arange(10).view(5, 2)
    with patch.dict(sys.modules, parents | {name: stub}):
        sys.modules.pop("minitransformer.plugins.sglang.routed", None)
        note = importlib.import_module("minitransformer.plugins.sglang.routed").noting()
        sys.modules.pop("minitransformer.plugins.sglang.routed")
    note("layers.1.expert_ids", ids), note("layers.1.qkv", ids)
    assert buffer[:, 1].tolist() == ids[:3].tolist() and not buffer[:, 0].any()


def test_sizes_end_where_a_chunk_fits():
    assert needed(SIZES, 64) == [128] and needed(SIZES, 128) == [128] and needed(SIZES, 129) == [128, 256]
    assert needed(SIZES, 8192) == needed(SIZES, -1) == list(SIZES)
    assert needed(SIZES, 8192, 600) == [128, 256, 512] and needed(SIZES, 200, 2048) == [128, 256]
