"""The largest sizes that a config may ask for, checked before anything is allocated or looped over.

Far above every published model, and low enough that no loop or table of these sizes fills the machine.
"""

from minitransformer.errors import InputError
from minitransformer.files import shown

LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_layers": 2**14,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**14,
    "intermediate_size": 2**24,
    "expert_size": 2**24,
    "num_experts": 2**16,
    "top_k": 2**16,
    "max_positions": 2**24,
}
MAX_EXPERTS = 2**20  # in all layers
MAX_TABLE = 2**31  # entries of the rope table, FP32
MIN_EPS = 2.0**-126  # FP32's smallest normal number: below it eps is 0, or 0 on a device that flushes subnormals


def check_size(name: str, key: str, value: int) -> None:
    """name: ours, key: config.json's. InputError unless 1 <= value <= LIMITS[name]."""
    if value < 1:
        raise InputError(f"config.json: {key} = {shown(value)} must be at least 1")
    if value > LIMITS[name]:
        raise InputError(f"config.json: {key} = {shown(value)} is too large; {LIMITS[name]} is the most here")


def check_products(num_layers: int, num_experts: int, max_positions: int, head_dim: int) -> None:
    """InputError where sizes that are fine alone are too many together."""
    if num_layers * num_experts > MAX_EXPERTS:
        raise InputError(
            f"config.json: num_experts = {num_experts} in num_hidden_layers = {num_layers} layers are too many; "
            f"{MAX_EXPERTS} in all layers is the most here"
        )
    if max_positions * head_dim > MAX_TABLE:
        raise InputError(
            f"config.json: max_position_embeddings = {max_positions} needs a rope table of "
            f"{max_positions * head_dim / 2**28:.1f} GiB; {MAX_TABLE // head_dim} is the most here"
        )
