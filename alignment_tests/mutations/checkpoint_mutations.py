"""Faults of checkpoint readers and writers seen in the field, put back on purpose, with the test that must notice."""

import tempfile
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from alignment_tests import test_cli_quantize, test_paths
from alignment_tests.model import test_bad_checkpoints, test_config, test_saving, test_weights
from alignment_tests.model.checkpoints import hf_config, refused
from alignment_tests.mutations import Mutation, patched
from minitransformer import checkpoint_files
from minitransformer.checkpoint_files import TensorFiles
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe import config as config_module
from minitransformer.models.qwen3_moe import layout, weights
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig, Yarn
from minitransformer.models.qwen3_moe.layout import Piece
from minitransformer.tokenizer import Tokenizer

_mlp, _pieces, _get, _take = layout._mlp_pieces, layout.pieces, TensorFiles.__getitem__, config_module._take
_read_rope, _sparse, _ramp = config_module.read_rope, config_module._sparse_layers, Yarn.ramp


def _in_temporary(check: Callable[[Path], None]) -> Callable[[], None]:
    def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            check(Path(directory))

    return run


def _up_first(ours, theirs, F, expert):
    gate, up, down = _mlp(ours, theirs, F, expert)
    return [gate._replace(key=up.key), up._replace(key=gate.key), down]


def _up_first_when_fused(self, name):
    tensor = _get(self, name)
    return torch.cat(tensor.chunk(2, 1)[::-1], 1) if name.endswith("gate_up_proj") else tensor


def _experts_by_name(config, fused=frozenset()):
    """Expert 10 before expert 2, as sorted() of the keys has it."""
    order = sorted(range(config.num_experts), key=str)
    for p in _pieces(config, fused):
        moved = p.index and isinstance(p.index[0], int)
        yield Piece(p.parameter, (order.index(p.index[0]), *p.index[1:]), p.key) if moved else p


def _v_before_k(config, fused=frozenset()):
    swap = {"k_proj": "v_proj", "v_proj": "k_proj"}
    for p in _pieces(config, fused):
        name = p.key.split(".")[-2]
        yield p._replace(key=p.key.replace(name, swap[name])) if name in swap else p


def _default(name: str, value: Callable[[dict], object]):
    """A reader that guesses where the key is missing."""

    def take(hf, wanted):
        keys = config_module._KEYS[name][1]
        return value(hf) if wanted == name and not any(k in hf for k in keys) else _take(hf, wanted)

    return take


def _theta_10000(hf):
    return (10000.0, None) if "rope_theta" not in hf and "rope_parameters" not in hf else _read_rope(hf)


def _only_the_top_level_theta(hf):
    return hf.get("rope_theta", 10000.0), None


def _truncating(parameter, parts, files):
    for piece in parts:
        stored = files[piece.key].float()
        cut = stored.view(torch.int32).bitwise_and(-65536).view(torch.float32)
        parameter[piece.index].copy_(cut.bfloat16())


def _layer_counted_from_zero(hf, num_layers):
    step = hf.get("decoder_sparse_step", 1)
    return tuple(i not in (hf.get("mlp_only_layers") or []) and i % step == 0 for i in range(num_layers))


@contextmanager
def _in_place(directory, own):
    """Opens the files under their own names: an error half way leaves neither the old checkpoint nor the new one."""
    Path(directory).mkdir(exist_ok=True)
    (Path(directory) / "model.safetensors").unlink(missing_ok=True)
    try:
        yield Path(directory)
    except OSError as error:
        raise InputError(f"{directory}: {error.strerror}; nothing was changed") from None


def _missing(key: str) -> Callable[[], None]:
    return lambda: refused(lambda: Qwen3MoeConfig.from_hf(hf_config(**{key: None})), key)


def _failing_save(directory: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_saving.check_a_failed_save_changes_nothing(directory, monkeypatch)


def _yarn() -> None:
    test_config.check_yarn(Yarn(4.0, 32768), 1e6, 128)


def _long_text(directory: Path) -> None:
    from alignment_tests.model.test_prompts import check_nothing_is_cut_or_padded

    check_nothing_is_cut_or_padded(directory)


def _loading(name: str, owner: object, attribute: str, mutant: object, check: Callable) -> Mutation:
    return Mutation(name, "a stored layout keeps its bits", patched(owner, attribute, mutant), _in_temporary(check))


def _refusing(name: str, owner: object, attribute: str, mutant: object, check: Callable) -> Mutation:
    return Mutation(name, "bad input is refused", patched(owner, attribute, mutant), check)


def _nothing(*args) -> None:
    return None


MUTATIONS = [
    _loading("up rows first, per expert", layout, "_mlp_pieces", _up_first, test_weights.check_per_expert),
    _loading("up rows first, fused", TensorFiles, "__getitem__", _up_first_when_fused, test_weights.check_fused),
    _loading("up rows first, seen in the logits", TensorFiles, "__getitem__", _up_first_when_fused,
             test_weights.check_logits_against_transformers),
    _loading("experts in the order of their names", weights, "pieces", _experts_by_name, test_weights.check_per_expert),
    _loading("v before k", weights, "pieces", _v_before_k, test_weights.check_per_expert),
    _loading("FP32 cut to BF16", weights, "_fill", _truncating, test_weights.check_fp32),
    _refusing("a fused layout guessed from its shape", weights, "_refuse_undeclared_layout", _nothing,
              _in_temporary(test_weights.check_layout_is_declared)),
    _refusing("the stored head of a tied model ignored", weights, "differing",
              lambda a, b: torch.zeros(1, dtype=torch.bool),
              _in_temporary(test_weights.check_tied_head_must_be_the_embedding)),
    _refusing("extra tensors ignored", weights, "_compare", _nothing,
              _in_temporary(test_bad_checkpoints.check_extra_tensor)),
    _refusing("non-finite weights taken", weights, "_refuse_non_finite", _nothing,
              _in_temporary(test_bad_checkpoints.check_non_finite)),
    _refusing("rope_theta 10000 when missing", config_module, "read_rope", _theta_10000, _missing("rope_theta")),
    _refusing("rope_parameters overlooked", config_module, "read_rope", _only_the_top_level_theta,
              test_config.test_both_spellings_give_the_same_config),
    _refusing("head_dim derived when missing", config_module, "_take",
              _default("head_dim", lambda hf: hf["hidden_size"] // hf["num_attention_heads"]), _missing("head_dim")),
    _refusing("norm_topk_prob false when missing", config_module, "_take",
              _default("norm_topk_prob", lambda hf: False), _missing("norm_topk_prob")),
    _refusing("layers counted from zero", config_module, "_sparse_layers", _layer_counted_from_zero,
              test_config.test_sparse_layers_as_transformers_chooses_them),
    _refusing("YaRN interpolates every frequency", Yarn, "ramp", lambda *args: _ramp(*args) * 0 + 1, _yarn),
    _refusing("YaRN without its attention factor", Yarn, "attention_scale", lambda self: 1.0, _yarn),
    Mutation("directories made for what failed stay", "a file appears whole or not at all",
             patched(checkpoint_files, "_remove_empty", _nothing),
             _in_temporary(test_cli_quantize.bad_weights_leave_nothing)),
    Mutation("two runs write one directory", "a file appears whole or not at all",
             patched(checkpoint_files, "holding", lambda lock: nullcontext(True)),
             _in_temporary(test_paths.the_second_of_two_is_refused)),
    Mutation("saving in place", "a file appears whole or not at all",
             patched(weights, "replacing_directory", _in_place), _in_temporary(_failing_save)),
    Mutation("a tokenizer's truncation kept", "a prompt is never shortened",
             patched(Tokenizer, "_as_written", lambda self: None), _in_temporary(_long_text)),
]  # fmt: skip
