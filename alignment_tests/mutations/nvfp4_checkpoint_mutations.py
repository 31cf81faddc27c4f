"""Faults of NVFP4 checkpoint readers and writers seen in the field, put back on purpose; each must be noticed."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from alignment_tests.model import test_bad_nvfp4_checkpoints as bad
from alignment_tests.model import test_nvfp4_reading as reading
from alignment_tests.model import test_nvfp4_writing as writing
from alignment_tests.mutations import Mutation, patched
from minitransformer.checkpoint_files import TensorFiles
from minitransformer.models.qwen3_moe import nvfp4_config, nvfp4_layout, quantise, weights_nvfp4
from minitransformer.models.qwen3_moe.nvfp4_config import Quantisation
from minitransformer.models.qwen3_moe.nvfp4_layout import Format
from minitransformer.ops import nvfp4
from minitransformer.ops.nvfp4 import Nvfp4

_get, _parts, _read_layer = TensorFiles.__getitem__, nvfp4_layout.parts, weights_nvfp4._read_layer
_quantise_experts, _files = quantise.quantise_experts, nvfp4_config.quantisation_files
_expert_tensors = quantise.expert_tensors


def _in_temporary(*checks: Callable[[Path], None]) -> Callable[[], None]:
    def run() -> None:
        for check in checks:
            with tempfile.TemporaryDirectory() as directory:
                check(Path(directory))

    return run


def _not_inverted(self, key, stored):
    return stored


def _inverted_always(self, key, stored):
    return nvfp4_layout.decode_of(stored)


def _unchecked(self, key, stored):
    return nvfp4_layout.decode_of(stored) if self.encode else stored


def _merged(choose: Callable):
    """One outer scale for gate and up, as engines with one scale an expert take it."""

    def read(files, form, config, layer):
        layer = _read_layer(files, form, config, layer)
        outer = layer["gate_up"].outer
        layer["gate_up"].outer.copy_(choose(outer)[:, None].expand_as(outer).clone())
        return layer

    return read


def _up_first(config, layer):
    for part in _parts(config, layer):
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        module, _, last = part.module.rpartition(".")
        yield part._replace(module=f"{module}.{other.get(last, last)}")


def _scales_of_expert_0(config, layer):
    """A stride of 0: each expert's tensors are read from expert 0."""
    for part in _parts(config, layer):
        yield part._replace(module=part.module.replace(f".experts.{part.expert}.", ".experts.0."))


def _high_nibble_first(self, name):
    tensor = _get(self, name)
    return tensor >> 4 | tensor << 4 if tensor.dtype == torch.uint8 else tensor


def _scales_by_value(files, key):
    return files[key].float().to(torch.uint8)  # 0.25 becomes 0: the value, not the bits


def _a_scale_for_each_half(weight):
    gate, up = (nvfp4.quantize(half.contiguous(), "expert") for half in weight.chunk(2, 1))
    codes, scales = torch.cat([gate.codes, up.codes], 1), torch.cat([gate.scales, up.scales], 1)
    return Nvfp4(codes, scales, torch.stack([gate.outer, up.outer], 1))


def _amax_over_2688(weight):
    """The outer scale as ModelOpt takes it: another FP32 number for every fourth amax."""
    q = _quantise_experts(weight)
    amax = weight.float().abs().amax((1, 2)).numpy()
    return Nvfp4(q.codes, q.scales, torch.from_numpy(amax / np.float32(2688)))


def _names_without_wildcards(*args):
    inline, separate = _files(*args)
    short = [entry.rstrip("*").removesuffix(".").removesuffix(".*$") for entry in inline["ignore"]]
    separate = separate and separate | {"quantization": separate["quantization"] | {"exclude_modules": short}}
    return inline | {"ignore": short}, separate


def _swizzled(*args):
    for name, tensor in _expert_tensors(*args):
        if tensor.dtype == torch.float8_e4m3fn:
            order = nvfp4.swizzle_128x4(tensor.view(torch.uint8))
            tensor = order[: tensor.numel()].reshape(tensor.shape).view(torch.float8_e4m3fn)
        yield name, tensor


class _OneHalfIsEnough(TensorFiles):
    """A scale that gate or up lacks is the other's, as engines have it that keep one for both."""

    def __init__(self, directory):
        super().__init__(directory)
        self.lent = {}
        for name in list(self.files):
            gate, up = (name.replace(*pair) for pair in (("up_proj", "gate_proj"), ("gate_proj", "up_proj")))
            other = up if name == gate else gate
            if other not in self.files and "scale" in name:
                self.lent[other] = name
                for known in (self.files, self.shapes, self.dtypes):
                    known[other] = known[name]

    def __getitem__(self, name):
        return super().__getitem__(self.lent.get(name, name))


def _everything(self, module):
    return True


def _wrong_kind(directory: Path) -> None:
    for form in ("modelopt", "compressed-tensors"):
        bad.check_wrong_kind(directory, form)


STORED, TRIP = "what is stored is what is meant", "on load, ModelOpt and compressed-tensors: the same bits"
_read_pairs = _in_temporary(reading.check_gate_and_up_keep_their_scales)
_read, _trip = _in_temporary(reading.check_reading), _in_temporary(reading.check_round_trip)

MUTATIONS = [
    Mutation("an encode scale taken for a decode scale", STORED, patched(Format, "read_scale", _not_inverted),
             _read_pairs),
    Mutation("a decode scale inverted", STORED, patched(Format, "read_scale", _inverted_always), _read_pairs),
    Mutation("the kind of a scale not checked", "a scale of the wrong kind is refused",
             patched(Format, "read_scale", _unchecked), _in_temporary(_wrong_kind)),
    Mutation("gate and up share the larger scale", STORED,
             patched(weights_nvfp4, "_read_layer", _merged(lambda outer: outer.amax(1))), _read_pairs),
    Mutation("gate's scale taken for up", STORED,
             patched(weights_nvfp4, "_read_layer", _merged(lambda outer: outer[:, 0])), _read_pairs),
    Mutation("up rows first", STORED, patched(weights_nvfp4, "parts", _up_first), _read),
    Mutation("expert 0's tensors for each expert", STORED, patched(weights_nvfp4, "parts", _scales_of_expert_0), _read),
    Mutation("the high nibble first", STORED, patched(TensorFiles, "__getitem__", _high_nibble_first), _read),
    Mutation("block scales read by value", STORED, patched(weights_nvfp4, "_block_scales", _scales_by_value), _read),
    Mutation("the ignore list not obeyed", "names decide what is quantised",
             patched(Quantisation, "quantises", _everything),
             _in_temporary(reading.check_left_out_layers_stay_bf16)),
    Mutation("only the tensors decide", "names decide what is quantised",
             patched(weights_nvfp4, "_refuse_quantised_elsewhere", lambda files, said: None),
             _in_temporary(lambda d: bad.check_the_list_is_obeyed(d, "compressed-tensors"))),
    Mutation("a half that stands twice is overlooked", "every tensor is used exactly once",
             patched(weights_nvfp4, "_check_headers", lambda *args: None),
             _in_temporary(lambda d: bad.check_double_half(d, "modelopt"))),
    Mutation("half a scale is enough", "every tensor is used exactly once",
             patched(weights_nvfp4, "TensorFiles", _OneHalfIsEnough),
             _in_temporary(lambda d: [bad.check_scale_of_one_half(d, form) for form in bad.FORMS])),
    Mutation("a list that forgets what is stored in BF16", "names decide what is quantised",
             patched(weights_nvfp4, "_refuse_forgotten", lambda files, said: None),
             _in_temporary(lambda d: bad.check_what_the_list_forgot(d, "modelopt"))),
    Mutation("gate and up with an amax each", TRIP, patched(quantise, "quantise_experts", _a_scale_for_each_half),
             _trip),
    Mutation("amax / 2688 for the outer scale", TRIP, patched(quantise, "quantise_experts", _amax_over_2688), _trip),
    Mutation("a decode scale written as an encode scale", TRIP,
             patched(Format, "stored_scale", lambda self, key, decode: decode), _trip),
    Mutation("block scales written swizzled", TRIP, patched(quantise, "expert_tensors", _swizzled), _trip),
    Mutation("left-out modules without wildcards", "engines leave out what we leave out",
             patched(quantise, "quantisation_files", _names_without_wildcards),
             _in_temporary(writing.test_left_out_modules_as_the_engines_match_them)),
]  # fmt: skip
