"""The model's shape and options, read from and written to Hugging Face's config.json.

Only this file and weights.py know Hugging Face names. Transformers 4 and 5 spell some keys differently; either is
read, both are written, two spellings that disagree are refused. What changes the numbers is never defaulted in
silence: a key of that kind that is missing, and a key that this reader does not know, are errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from minitransformer.errors import InputError
from minitransformer.files import shown
from minitransformer.models.qwen3_moe.rope_scaling import Yarn, inverse_frequencies, read_rope, typed, write_rope
from minitransformer.models.qwen3_moe.sizes import MIN_EPS, check_products, check_size

__all__ = ["Qwen3MoeConfig", "Yarn", "inverse_frequencies"]

# Our name -> (type, the names that transformers gives it; all of them are written).
_KEYS: dict[str, tuple[type, tuple[str, ...]]] = {
    "vocab_size": (int, ("vocab_size",)),
    "hidden_size": (int, ("hidden_size",)),
    "num_layers": (int, ("num_hidden_layers",)),
    "num_heads": (int, ("num_attention_heads",)),
    "num_kv_heads": (int, ("num_key_value_heads",)),
    "head_dim": (int, ("head_dim",)),
    "intermediate_size": (int, ("intermediate_size",)),
    "expert_size": (int, ("moe_intermediate_size",)),
    "num_experts": (int, ("num_experts", "num_local_experts")),
    "top_k": (int, ("num_experts_per_tok",)),
    "norm_topk_prob": (bool, ("norm_topk_prob",)),
    "rms_eps": (float, ("rms_norm_eps",)),
    "max_positions": (int, ("max_position_embeddings",)),
    "tie_word_embeddings": (bool, ("tie_word_embeddings",)),
}

# Options that this model does not have: the values that mean "off"; a missing key means off too, because switching one
# of them on either needs the key itself or brings tensors that loading would refuse as unused.
_ONLY: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False, None),
    "attention_bias": (False, None),
    "qkv_bias": (False, None),
    "mlp_bias": (False, None),
    "use_qk_norm": (True, None),
    "shared_expert_intermediate_size": (0, None),
    "n_shared_experts": (0, None),
    "partial_rotary_factor": (1.0, 1, None),
    "dual_chunk_attention_config": (None,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}
_HELP = {
    "use_sliding_window": "every layer attends to the whole context here: set it to false if the model was trained so",
    "quantization_config": "this needs BF16 or FP32 weights: take the checkpoint that was quantised",
    "shared_expert_intermediate_size": "shared experts belong to another architecture (qwen2_moe, qwen3_next)",
    "n_shared_experts": "shared experts belong to another architecture",
}
_DTYPES = ("bfloat16", "float32")

# Keys without influence on the forward pass, or read by hand below.
_IGNORED = frozenset(
    "architectures model_type attention_dropout bos_token_id pad_token_id eos_token_id sep_token_id cls_token_id "
    "decoder_start_token_id dtype torch_dtype initializer_range use_cache transformers_version router_aux_loss_coef "
    "output_router_logits output_attentions output_hidden_states return_dict sliding_window max_window_layers "
    "chunk_size_feed_forward problem_type id2label label2id num_labels is_decoder torchscript auto_map pruned_heads "
    "use_bfloat16 tf_legacy_loss finetuning_task task_specific_params tokenizer_class prefix use_mrope "
    "mlp_only_layers decoder_sparse_step hidden_act rope_theta rope_scaling rope_parameters base_model_tp_plan "
    "layer_types".split()
)


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """Shape of one Qwen3-MoE model; sizes are counts. Raises InputError when the sizes do not fit together.

    D hidden_size, N num_heads, G num_kv_heads, H head_dim, I intermediate_size (dense layers), F expert_size,
    E num_experts, K top_k, V vocab_size. sparse_layers[i] says whether layer i has experts. eos_token_ids may be empty.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    expert_size: int
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    rms_eps: float
    rope_theta: float
    max_positions: int
    tie_word_embeddings: bool
    rope_scaling: Yarn | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int:
                check_size(field.name, _hf(field.name), getattr(self, field.name))
        check_products(self.num_layers, self.num_experts, self.max_positions, self.head_dim)
        for name in ("hidden_size", "head_dim", "intermediate_size", "expert_size"):
            # One step of the matrix product takes 16 products, so a reduction is a whole number of steps.
            if getattr(self, name) % 16:
                raise InputError(f"config.json: {_hf(name)} = {getattr(self, name)} is not a multiple of 16")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"config.json: num_attention_heads = {self.num_heads} is not a multiple of num_key_value_heads = "
                f"{self.num_kv_heads}"
            )
        if self.top_k > self.num_experts:
            raise InputError(
                f"config.json: num_experts_per_tok = {self.top_k} exceeds num_experts = {self.num_experts}"
            )
        if len(self.sparse_layers) != self.num_layers:
            raise InputError(f"sparse_layers has {len(self.sparse_layers)} entries for {self.num_layers} layers")
        if not MIN_EPS <= self.rms_eps < 1:
            raise InputError(
                f"config.json: rms_norm_eps = {self.rms_eps} must lie between {MIN_EPS:.4g} (FP32's smallest normal "
                "number) and 1"
            )
        if not 1 < self.rope_theta < float("inf"):
            raise InputError(f"config.json: rope_theta = {self.rope_theta} must exceed 1")
        for i in self.eos_token_ids:
            if not 0 <= i < self.vocab_size:
                raise InputError(
                    f"config.json: eos_token_id = {shown(i)} is outside the vocabulary of {self.vocab_size}"
                )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "Qwen3MoeConfig":
        """Read the content of config.json, and of generation_config.json if there is one (its eos_token_id wins).

        Raises InputError that names the key, its value and what to do.
        """
        if not isinstance(hf, Mapping):
            raise InputError("config.json: expected an object with keys")
        _refuse_unsupported(hf)
        values = {name: _take(hf, name) for name in _KEYS}
        theta, yarn = read_rope(hf)
        eos = (generation or {}).get("eos_token_id")
        return cls(
            **values,
            sparse_layers=_sparse_layers(hf, values["num_layers"]),
            rope_theta=theta,
            rope_scaling=yarn,
            eos_token_ids=_token_ids(hf.get("eos_token_id") if eos is None else eos),
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json, in the spellings of transformers 4 and 5 at once; from_hf reads it back equal."""
        hf: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        for name, (_, keys) in _KEYS.items():
            hf |= {key: getattr(self, name) for key in keys}
        eos = list(self.eos_token_ids)
        return (
            hf
            | write_rope(self.rope_theta, self.rope_scaling)
            | {
                "attention_bias": False,
                "decoder_sparse_step": 1,
                "dtype": "bfloat16",
                "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
                "hidden_act": "silu",
                "mlp_only_layers": [i for i, sparse in enumerate(self.sparse_layers) if not sparse],
                "torch_dtype": "bfloat16",
                "use_sliding_window": False,
            }
        )


def _hf(name: str) -> str:
    return _KEYS[name][1][0] if name in _KEYS else name


def _take(hf: Mapping[str, Any], name: str) -> Any:
    """One value under any of its spellings; missing or contradicting spellings are refused."""
    kind, keys = _KEYS[name]
    found = {key: typed(key, hf[key], kind) for key in keys if hf.get(key) is not None}
    if not found:
        raise InputError(f"config.json: {' (or '.join(keys)}{')' * (len(keys) - 1)} is missing; add it (no default)")
    if len(set(found.values())) > 1:
        raise InputError(f"config.json: {' and '.join(f'{k} = {v}' for k, v in found.items())} disagree; correct one")
    value = next(iter(found.values()))
    if kind is int:
        check_size(name, keys[0], value)  # now: the list of sparse layers is made before the config is
    return value


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    if hf.get("model_type") != "qwen3_moe":
        raise InputError(f"config.json: model_type = {hf.get('model_type')!r} is not supported; only 'qwen3_moe' is")
    architectures = hf.get("architectures")
    if architectures not in (None, [], ["Qwen3MoeForCausalLM"]):
        raise InputError(
            f"config.json: architectures = {architectures!r} is not supported; only Qwen3MoeForCausalLM is"
        )
    if hf.get("hidden_act") != "silu":
        raise InputError(f"config.json: hidden_act = {hf.get('hidden_act')!r} is not supported; only 'silu' is")
    dtypes = {key: hf[key] for key in ("dtype", "torch_dtype") if hf.get(key) is not None}
    for key, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise InputError(f"config.json: {key} = {shown(dtype)} is not supported; convert the weights to bfloat16")
    if len(set(dtypes.values())) > 1:
        raise InputError(f"config.json: {' and '.join(f'{k} = {v}' for k, v in dtypes.items())} disagree; correct one")
    layers = hf.get("layer_types")
    if layers is not None and not (isinstance(layers, list) and all(kind == "full_attention" for kind in layers)):
        raise InputError(f"config.json: layer_types = {shown(layers)} is not supported; only full_attention is")
    for key, allowed in _ONLY.items():
        # Compared with the type, so that 0 is not taken for False.
        if key in hf and not any(hf[key] == a and type(hf[key]) is type(a) for a in allowed):
            raise InputError(
                f"config.json: {key} = {str(hf[key])[:60]} is not supported; {_HELP.get(key, f'only {allowed[0]} is')}"
            )
    known = _IGNORED | _ONLY.keys() | {key for _, keys in _KEYS.values() for key in keys}
    for key, value in hf.items():
        if key not in known and value is not None and not key.startswith("_"):
            raise InputError(
                f"config.json: {key} = {str(value)[:60]} is not known here; remove it if it does not change the output"
            )


def _sparse_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    # Safe to default: a wrong choice of sparse layers asks for tensors that the checkpoint does not have.
    dense = hf.get("mlp_only_layers") or []
    step = hf.get("decoder_sparse_step", 1)
    if not isinstance(dense, list) or any(type(i) is not int or not 0 <= i < num_layers for i in dense):
        raise InputError(
            f"config.json: mlp_only_layers = {shown(dense)} should list layers between 0 and {num_layers - 1}"
        )
    if typed("decoder_sparse_step", step, int) < 1:
        raise InputError(f"config.json: decoder_sparse_step = {step} must be at least 1")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(typed("eos_token_id", i, int) for i in ids)
