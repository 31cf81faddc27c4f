"""The experts of a sparse layer in one number format: the leaf that a recipe swaps. model.py does not know which.

Each is called as experts(mlp, x_TD, plan, weights_TK, note) -> y_TD and reads mlp.gate_up and mlp.down.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minitransformer.errors import InputError, RowError
from minitransformer.models.qwen3_moe.layers import no_trace
from minitransformer.ops import dispatch, gpu, mxfp8, nvfp4
from minitransformer.ops.dispatch import Plan
from minitransformer.ops.grouped_linear import grouped_linear
from minitransformer.ops.nvfp4 import Nvfp4
from minitransformer.ops.quantised_linear import quantised_linear
from minitransformer.ops.swiglu import swiglu, swiglu_amax
from minitransformer.recipe import Recipe
from minitransformer.weights_stamp import WeightsStamp


@dataclass
class Bf16Experts:
    """gather -> FC1 -> swiglu -> FC2, scaled by the routing weight -> combine."""

    backward: str = "bf16"
    capturable = True  # in a CUDA graph, where it reads the parameters in place

    def __call__(self, mlp, x_TD: Tensor, plan: Plan, weights_TK: Tensor, note) -> Tensor:
        x_RD = dispatch.gather(x_TD, plan)
        gate_up_R2F = grouped_linear(x_RD, mlp.gate_up.weight, plan, None, self.backward)
        note("gate_up", gate_up_R2F, plan)
        h_RF = swiglu(gate_up_R2F)
        note("swiglu", h_RF, plan)
        y_RD = grouped_linear(h_RF, mlp.down.weight, plan, weights_TK, self.backward)
        note("down", y_RD, plan)
        return dispatch.combine(y_RD, plan)

    def operands(self, mlp, device) -> list[Tensor]:
        """What products read beside the parameters."""
        return []

    def refresh(self, mlp) -> None:
        """Nothing is kept beside the parameters."""

    def forget(self) -> None:
        """As refresh."""


@dataclass
class QuantisedExperts:
    """gather -> quantise -> FC1 -> swiglu in FP32 -> quantise -> FC2 -> combine with the routing weights.

    fixed: the quantised weights of a checkpoint that has no others ("gate_up", "down"); else mlp's BF16 weights are
    quantised once after each change of them that WeightsStamp sees, not once a forward.
    """

    recipe: Recipe
    fixed: dict[str, Nvfp4] = field(default_factory=dict)
    _made: dict[str, tuple] = field(default_factory=dict, repr=False)

    @property
    def capturable(self) -> bool:
        """In a CUDA graph: not where rows that pad a batch would move the others' scale."""
        return self.recipe.activation_scale != "tensor"

    def __call__(self, mlp, x_TD: Tensor, plan: Plan, weights_TK: Tensor, note) -> Tensor:
        # Both before any row: a product may read its weight while the two kernels in front of it still run.
        of = self._operands(mlp, x_TD.device)
        if self._bare(x_TD, note) and gpu.quantised_experts.takes(of["gate_up"], of["down"]):
            return gpu.quantised_experts.forward(x_TD, plan, weights_TK, of["gate_up"], of["down"])
        gate_up_R2F = self._product(mlp, "gate_up", of["gate_up"], x_TD, plan, torch.float32, note)
        note("gate_up", gate_up_R2F, plan)
        y_RD = self._product(mlp, "down", of["down"], gate_up_R2F, plan, torch.bfloat16, note)
        note("down", y_RD, plan)
        return dispatch.combine_weighted(y_RD, plan, weights_TK)

    def _product(self, mlp, name: str, operand: tuple, x: Tensor, plan: Plan, out_dtype, note) -> Tensor:
        layer = getattr(mlp, name)
        weight = None if layer is None else layer.weight
        rows = self._rows(name, x, plan, note)
        return quantised_linear(rows[0], weight, rows[1], operand, plan, out_dtype, self.recipe.backward, early=True)

    def _at_once(self, x: Tensor) -> bool:
        """Whether one kernel makes the rows and quantises them."""
        return self.recipe.activation_scale == "row" and x.is_cuda and gpu.quantised_rows.serves(x.shape[1])

    def _bare(self, x: Tensor, note) -> bool:
        """Whether nobody asks for more than the output: no trace, no gradient."""
        return note is no_trace and not torch.is_grad_enabled() and self._at_once(x)

    def _rows(self, name: str, x: Tensor, plan: Plan, note) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        """A product's BF16 input, and as it reads it: the decoded operand and outer scales FP32 [R] or None.

        gate_up: tokens x [T, D], gathered. down: SwiGLU of x [R, 2F] FP32.
        """
        gathers = name == "gate_up"
        if self._at_once(x):
            x_RK, q, decoded = (gpu.quantised_rows.gather if gathers else gpu.quantised_rows.swiglu)(x, plan)
        else:
            x_RK, amax_R = dispatch.gather_amax(x, plan) if gathers else swiglu_amax(x)
            _refuse_non_finite(name, amax_R, plan)
            q, decoded = self._quantise(f"experts.{name}", x_RK.detach(), amax_R, plan)
        if not gathers:
            note("swiglu", x_RK, plan)
        if q is not None:
            for part in ("codes", "scales", "outer"):
                if hasattr(q, part):
                    note(f"{name}_{part}", getattr(q, part), plan)
        return x_RK, (decoded, getattr(q, "outer", None))

    def _quantise(self, fault: str, x_RK: Tensor, amax_R: Tensor, plan: Plan):
        """(what the recipe's activations become, None in BF16; decoded BF16)."""
        if self.recipe.activations == "bf16":
            if x_RK.is_cuda:
                gpu.quantised_linear.refuse_non_finite(amax_R, plan, fault)
            return None, x_RK
        if self.recipe.activations == "mxfp8":
            return mxfp8.quantize_decoded(x_RK, fault, plan)
        if self.recipe.activation_scale == "tensor":  # one outer scale for whoever shares the batch: the fault on show
            amax_R = amax_R.max().expand_as(amax_R).contiguous()
        return nvfp4.quantize_decoded(x_RK, amax_R, fault, plan)

    def quantised(self, name: str, weight: Tensor | None) -> Nvfp4:
        """The quantised weight: codes [E, N, K/2], block scales [E, N, K/16], outer scales [E, N] or fewer."""
        if name in self.fixed:
            return self.fixed[name]
        if self.recipe.weight_scale == "row":
            return nvfp4.quantize(weight.detach(), "row")
        return nvfp4.quantize(weight.detach(), "expert")  # gate and up share one amax: they are one tensor here

    def weight_operand(self, name: str, weight: Tensor | None, device="cpu") -> tuple[Tensor, Tensor]:
        """(the weight as products read it, outer scales FP32 [E, N]), made again after each change of WeightsStamp.

        On the CPU decoded BF16 [E, N, K]; on a GPU packed, 4.5 bits a value (gpu/pack.py), and nothing else is kept.
        """
        stamp, old = (str(device), WeightsStamp([] if weight is None else [weight])), self._made.get(name)
        if old is None or old[0] != stamp:
            q = self.quantised(name, weight)
            q = Nvfp4(q.codes.to(device), q.scales.to(device), q.outer.to(device))
            made = gpu.pack.pack(q) if q.codes.is_cuda else nvfp4.decode(q)
            made = made, nvfp4.expand_rows(q.outer, q.shape[:-1]).contiguous()
            if old is not None and made[0].is_cuda and old[1].device == made[0].device:
                made = old[1].copy_(made[0]), old[2].copy_(made[1])  # in place: CUDA graphs read there
            self._made[name] = stamp, *made
        return self._made[name][1:]

    def _operands(self, mlp, device) -> dict[str, tuple[Tensor, Tensor]]:
        layers = {name: getattr(mlp, name) for name in ("gate_up", "down")}
        weights = {name: None if layer is None else layer.weight for name, layer in layers.items()}
        return {name: self.weight_operand(name, weight, device) for name, weight in weights.items()}

    def operands(self, mlp, device) -> list[Tensor]:
        return [t for operand in self._operands(mlp, device).values() for t in operand]

    def refresh(self, mlp) -> None:
        """Makes the operands that there are again if the weights have changed: before a CUDA graph that reads them."""
        for name, (_, made, _) in self._made.items():
            layer = getattr(mlp, name)
            self.weight_operand(name, None if layer is None else layer.weight, made.device)

    def forget(self) -> None:
        """Makes the operands again at the next use: after a write that WeightsStamp does not see (.data, NumPy)."""
        self._made = {name: (None, *made) for name, (_, *made) in self._made.items()}


def _refuse_non_finite(name: str, amax_R: Tensor, plan: Plan) -> None:
    """RowError with the tokens; on a GPU, where asking would wait, the kernels leave the first for the next check."""
    bad = None if amax_R.is_cuda else ~torch.isfinite(amax_R)
    if bad is not None and bad.any():
        tokens = (plan.order_R[bad] // plan.rows_TK.shape[1]).unique()  # ascending
        raise RowError(f"experts.{name}", tokens, "the input is not finite; check the weights")


def experts_of(recipe: Recipe):
    """The leaf for one layer's recipe (Recipe.for_layer)."""
    return Bf16Experts(recipe.backward) if recipe.weights == "bf16" else QuantisedExperts(recipe)


def forget_copies(layers: Sequence[Any]) -> None:
    """Quantised copies of the layers' weights are made again at their next use, once."""
    for mlp in (layer.mlp for layer in layers if hasattr(layer.mlp, "experts")):
        mlp.experts.forget()


def choose(layers: Sequence[Any], config: Any, recipe: Recipe) -> Recipe:
    """Gives every sparse layer its leaf, and returns the recipe with what a quantised checkpoint leaves in BF16."""
    sparse = {i: layer.mlp for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts")}
    recipe.check_overrides(sparse)
    left_out = tuple((str(i), "bf16") for i, mlp in sparse.items() if mlp.gate_up is not None)
    if len(left_out) == len(sparse):
        left_out = ()  # a BF16 checkpoint
    recipe = replace(recipe, overrides=left_out + recipe.overrides)
    # By layer: the fingerprint is of what is computed, however the patterns were spelt.
    own, says = {i: recipe.for_layer(i).name for i in sparse}, {i for i, _ in left_out}
    overrides = tuple((str(i), name) for i, name in own.items() if name != recipe.name or str(i) in says)
    recipe = replace(recipe, overrides=overrides)
    for i, mlp in sparse.items():
        if recipe.for_layer(i).activations == "mxfp8" and (config.hidden_size | config.expert_size) % 32:
            raise InputError(
                f"layer {i}, {recipe.for_layer(i).name}: MXFP8 needs hidden and expert sizes that are multiples of 32"
            )
        if mlp.gate_up is None and recipe.for_layer(i).weight_scale != "expert":
            raise InputError(f"layer {i} exists only quantised; {recipe.for_layer(i).name} needs its BF16 weights")
    for i, mlp in sparse.items():
        mlp.set_recipe(recipe.for_layer(i))
    return recipe
