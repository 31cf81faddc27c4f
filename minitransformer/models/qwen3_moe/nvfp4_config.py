"""What config.json and hf_quant_config.json say about NVFP4: read strictly, written as each format's readers expect.

Which modules are quantised is decided by names: a target ("Linear", or patterns) and the list of those left out,
called `exclude_modules` in hf_quant_config.json and `ignore` in config.json. An entry covers the module it names and
everything below it. ModelOpt's entries are wildcards (`model.layers.3.mlp.experts*`), those of compressed-tensors are
names, or regular expressions after `re:`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from minitransformer import __version__
from minitransformer.checkpoint_files import read_json_if_there
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.nvfp4_layout import BLOCK, COMPRESSED_TENSORS, MODELOPT, Format, experts_prefix

HF_QUANT_CONFIG = "hf_quant_config.json"
# The recipes that a config can state; every other one is chosen when the checkpoint is loaded.
ALGORITHMS = {"NVFP4": "nvfp4_per_token", "W4A16_NVFP4": "w4a16"}

_OFF = (None, False, {}, [])
_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": True}
_KNOWN = {
    "modelopt": "quant_method quant_algo group_size config_groups ignore exclude_modules producer".split(),
    "compressed-tensors": "quant_method format config_groups ignore quantization_status global_compression_ratio "
    "version".split(),
    "weights": [*_WEIGHTS, "dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"],
    "group": "weights input_activations targets format".split(),
}


@dataclass(frozen=True)
class Quantisation:
    """A checkpoint's format, the recipe that its config states, and the names that decide what is quantised."""

    format: Format
    recipe: str
    ignore: tuple[str, ...]
    targets: tuple[str, ...] = ("Linear",)

    def ignores(self, module: str) -> str | None:
        """The entry that leaves this module (every one is a Linear) in BF16, or None."""
        words = module.split(".")
        names = [".".join(words[:n]) for n in range(1, len(words) + 1)]
        found = (_first_match(self.format, self.ignore, name) for name in names)
        return next((entry for entry in found if entry is not None), None)

    def targeted(self, module: str) -> bool:
        return "Linear" in self.targets or _first_match(self.format, self.targets, module) is not None

    def quantises(self, module: str) -> bool:
        return self.targeted(module) and self.ignores(module) is None


@lru_cache(maxsize=2**17)  # a layer's experts share their parents' names
def _first_match(form: Format, entries: tuple[str, ...], name: str) -> str | None:
    """The first entry that names this very module."""
    for entry in entries:
        if form is MODELOPT:
            matches = fnmatchcase(name, entry)
        else:
            matches = re.match(entry[3:], name) is not None if entry.startswith("re:") else entry == name
        if matches:
            return entry
    return None


def read_quantisation(directory: Path, hf: Mapping[str, Any]) -> Quantisation | None:
    """What a checkpoint says about its quantisation; None when it says nothing (BF16). Raises InputError."""
    found = []
    inline = hf.get("quantization_config") if isinstance(hf, Mapping) else None
    if inline is not None:
        where = f"{directory}/config.json: quantization_config"
        method = _mapping(where, inline).get("quant_method")
        readers = {"modelopt": _modelopt, "compressed-tensors": _compressed_tensors}
        if not isinstance(method, str) or method not in readers:
            raise InputError(f"{where}.quant_method = {method!r} is not supported; {' or '.join(readers)} is")
        found.append(readers[method](where, inline))
    content = read_json_if_there(directory / HF_QUANT_CONFIG, absent=())  # no JSON is a tuple
    if content != ():
        where = f"{directory}/{HF_QUANT_CONFIG}: quantization"
        found.append(_modelopt(where, _mapping(where, _mapping(where, content).get("quantization"))))
    if len(found) == 2 and (found[0].format, found[0].recipe, set(found[0].ignore)) != (
        found[1].format, found[1].recipe, set(found[1].ignore)
    ):  # fmt: skip
        raise InputError(
            f"{directory}: config.json and {HF_QUANT_CONFIG} disagree about the quantisation; correct one of them"
        )
    return found[0] if found else None


def _modelopt(where: str, found: Mapping[str, Any]) -> Quantisation:
    _only(where, found, _KNOWN["modelopt"])
    algorithm = str(found.get("quant_algo")).upper()
    if algorithm not in ALGORITHMS:
        raise InputError(
            f"{where}.quant_algo = {found.get('quant_algo')!r} is not supported; {' or '.join(ALGORITHMS)} is"
        )
    sizes = list(_values_of(found, "group_size"))
    if not sizes or any(type(size) is not int or size != BLOCK for size in sizes):
        raise InputError(f"{where}: group_size = {sorted({str(s)[:40] for s in sizes})}; NVFP4 has blocks of {BLOCK}")
    groups = found.get("config_groups")
    for name, group in _mapping(f"{where}.config_groups", groups).items() if groups is not None else ():
        _modelopt_group(f"{where}.config_groups.{name}", group, algorithm)
    names = [_names(f"{where}.{key}", found[key] or []) for key in ("exclude_modules", "ignore") if key in found]
    if len({frozenset(some) for some in names}) > 1:
        raise InputError(f"{where}: exclude_modules and ignore differ, and both list what stays in BF16; keep one")
    return Quantisation(MODELOPT, ALGORITHMS[algorithm], names[0] if names else ())


def _modelopt_group(where: str, group: Any, algorithm: str) -> None:
    """A group says again what quant_algo says: the same number formats, for every Linear."""
    _only(where, _mapping(where, group), ["weights", "input_activations", "targets"])
    for part in ("weights", "input_activations"):
        if group.get(part) is not None:
            given = {"type": "float", "group_size": BLOCK} | dict(_mapping(f"{where}.{part}", group[part]))
            _expect(f"{where}.{part}", given, {"num_bits": 4, "type": "float", "group_size": BLOCK})
    has = [part for part in ("weights", "input_activations") if group.get(part) is not None]
    wanted = ["weights", "input_activations"][: 1 if ALGORITHMS[algorithm] == "w4a16" else 2]
    if has != wanted:
        raise InputError(f"{where} has {has}, but quant_algo {algorithm} quantises {wanted}; correct one of them")
    # Readers of ModelOpt's format do not look at targets: whatever else stands there, they quantise every Linear.
    _expect(where, {"targets": group.get("targets", ["Linear"])}, {"targets": ["Linear"]})


def _compressed_tensors(where: str, found: Mapping[str, Any]) -> Quantisation:
    _only(where, found, _KNOWN["compressed-tensors"])
    _expect(where, found, {"format": "nvfp4-pack-quantized"})
    groups = list(_mapping(f"{where}.config_groups", found.get("config_groups")).values())
    if len(groups) != 1:
        raise InputError(f"{where}.config_groups: {len(groups)} groups; one number format for all experts is supported")
    where = f"{where}.config_groups"
    group = _mapping(where, groups[0])
    _only(where, group, _KNOWN["group"])
    _expect(where, {"format": group.get("format") or found["format"]}, {"format": "nvfp4-pack-quantized"})
    for part, dynamic in (("weights", False), ("input_activations", "local")):
        if part == "input_activations" and group.get(part) is None:
            continue
        args = _mapping(f"{where}.{part}", group.get(part))
        _only(f"{where}.{part}", args, _KNOWN["weights"])
        _expect(f"{where}.{part}", {"symmetric": True} | dict(args), _WEIGHTS | {"dynamic": dynamic})
        if args.get("scale_dtype") not in (None, "torch.float8_e4m3fn", "float8_e4m3fn"):
            raise InputError(f"{where}.{part}.scale_dtype = {args['scale_dtype']!r}; NVFP4 has E4M3 scales")
    recipe = "w4a16" if group.get("input_activations") is None else "nvfp4_per_token"
    names = (_names(where, found.get("ignore") or []), _names(where, group.get("targets") or []))
    return Quantisation(COMPRESSED_TENSORS, recipe, *names)


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: expected an object with keys, found {str(value)[:40]}")
    return value


def _names(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise InputError(f"{where}: expected a list of names, found {str(value)[:40]}")
    for entry in value:
        try:
            re.compile(entry[3:] if entry.startswith("re:") else "")
        except re.error as error:
            raise InputError(f"{where}: {entry!r} is no regular expression ({error})") from None
    return tuple(value)


def _only(where: str, found: Mapping[str, Any], known: list[str]) -> None:
    """What changes the numbers is never overlooked: a key that is not known here must be off."""
    for key, value in found.items():
        if key not in known and value not in _OFF:
            raise InputError(f"{where}.{key} = {str(value)[:60]} is not supported; remove it if it changes nothing")


def _expect(where: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if found.get(key) != value or type(found.get(key)) is not type(value):
            raise InputError(f"{where}.{key} = {found.get(key)!r} is not supported; {value!r} is")


def _values_of(tree: Any, key: str) -> Iterator[Any]:
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if name == key:
            yield value
        else:
            yield from _values_of(value, key)


def quantisation_files(
    form: Format, recipe: str, config: Qwen3MoeConfig, bf16_layers: Iterable[int]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(quantization_config for config.json, hf_quant_config.json or None) for experts quantised in all other layers."""
    ignore = ["lm_head", *_left_out(form, config, frozenset(bf16_layers))]
    if form is MODELOPT:
        algorithm = next(name for name, stated in ALGORITHMS.items() if stated == recipe)
        group: dict[str, Any] = {"targets": ["Linear"]}
        for part in ("weights", "input_activations")[: 2 if recipe == "nvfp4_per_token" else 1]:
            group[part] = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
        # Readers take a ModelOpt config only from a producer of this name.
        producer = {"name": "modelopt", "version": f"{__version__}+minitransformer"}
        shared = {"quant_algo": algorithm, "group_size": BLOCK}
        return (
            shared
            | {"quant_method": "modelopt", "config_groups": {"group_0": group}, "ignore": ignore, "producer": producer},
            {
                "producer": producer,
                "quantization": shared | {"kv_cache_quant_algo": None, "exclude_modules": ignore},
            },
        )
    group = {"targets": ["Linear"], "weights": _WEIGHTS | {"dynamic": False}, "input_activations": None}
    if recipe == "nvfp4_per_token":
        group["input_activations"] = _WEIGHTS | {"dynamic": "local"}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }, None


def _left_out(form: Format, config: Qwen3MoeConfig, bf16_layers: frozenset[int]) -> Iterator[str]:
    """Attention, routers, dense layers and the experts of the BF16 layers, as the format's readers match them."""
    star = "*" if form is MODELOPT else ".*"
    for i, sparse in enumerate(config.sparse_layers):
        at = f"model.layers.{i}."
        modules = [at + "self_attn" + star]
        modules += [at + "mlp.gate"] if sparse else [at + "mlp" + star]
        # With a regular expression the dot stays in: vLLM asks for the projections of expert 0, not for their parent.
        modules += [experts_prefix(i)[:-1] + star] if i in bf16_layers else []
        for name in modules:
            pattern = name if form is MODELOPT else "re:" + name.replace(".", r"\.").replace(r"\.*", ".*") + "$"
            yield pattern
