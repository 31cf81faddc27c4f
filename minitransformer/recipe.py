"""Recipes: which number format the experts' products use, by layer, as plain values. Standard library only.

A recipe changes bits, so it is part of the execution spec's fingerprint. An explicit argument beats the checkpoint's
config, the config beats the default (bf16); no environment variable is read.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache

from minitransformer.errors import InputError

PROJECTIONS = ("gate_up", "down")


@dataclass(frozen=True)
class Recipe:
    """One number format of the experts.

    weights            bf16 | nvfp4           blocks of 16 along K: E2M1 codes, an E4M3 scale each, an FP32 outer scale
    activations        bf16 | nvfp4 | mxfp8   mxfp8: blocks of 32, E4M3 codes, an E8M0 scale a block
    activation_scale   row | tensor | ""      what shares the outer scale of an NVFP4 activation
    weight_scale       expert | row | ""      what shares the outer scale of an NVFP4 weight (gate and up share one)
    backward           bf16 | mxfp8           operands of the gradient products
    overrides          (pattern, recipe name) pairs (`covers` says what a pattern is); the last match wins
    """

    name: str
    weights: str
    activations: str
    activation_scale: str = ""
    weight_scale: str = ""
    backward: str = "bf16"
    about: str = ""
    overrides: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        scales = {"nvfp4": ("row", "tensor")}.get(self.activations, ("",))
        good = (
            self.weights in ("bf16", "nvfp4")
            and self.activations in (("bf16", "nvfp4", "mxfp8") if self.weights == "nvfp4" else ("bf16",))
            and self.activation_scale in scales
            and self.weight_scale in (("expert", "row") if self.weights == "nvfp4" else ("",))
        )
        if not good:
            raise InputError(
                f"recipe {self.name!r}: weights {self.weights!r}/{self.weight_scale!r} with activations "
                f"{self.activations!r}/{self.activation_scale!r} is no format that exists; RECIPES has those that do"
            )
        if self.backward not in ("bf16", "mxfp8"):
            raise InputError(f"backward {self.backward!r} is not known; choose bf16 or mxfp8")

    def for_layer(self, layer: int) -> "Recipe":
        """The recipe of one layer, overrides applied, itself without overrides."""
        chosen = replace(self, overrides=())
        for pattern, name in self.overrides:
            if covers(pattern, layer):
                chosen = replace(get(name), backward=self.backward)
        return chosen

    def with_overrides(self, overrides: Iterable[tuple[str, str]], num_layers: int) -> "Recipe":
        """Adds (pattern, recipe name) pairs. InputError where a pattern matches no layer or a name is unknown."""
        added = tuple((str(pattern), get(name).name) for pattern, name in overrides)
        recipe = replace(self, overrides=self.overrides + added)
        recipe.check_overrides(range(num_layers))
        return recipe

    def check_overrides(self, layers: Iterable[int]) -> None:
        """InputError for an override that matches none of these layers (those with experts)."""
        layers = list(layers)
        for pattern, _ in self.overrides:
            if not any(covers(pattern, i) for i in layers):
                raise InputError(
                    f"recipe override {pattern!r} matches no layer with experts as a whole; give its number, or a "
                    "pattern such as 'layers.3.mlp' or 'model.layers.*.mlp.experts*'"
                )

    def with_backward(self, backward: str) -> "Recipe":
        """The same recipe with another backward. InputError if it has none of that kind."""
        return replace(self, backward=backward)

    @property
    def key(self) -> str:
        """One line that differs whenever the bits may: for the fingerprint."""
        parts = [self.name, f"w={self.weights}/{self.weight_scale or '-'}"]
        parts += [f"a={self.activations}/{self.activation_scale or '-'}", f"backward={self.backward}"]
        return " ".join(parts + [f"{pattern}->{name}" for pattern, name in self.overrides])


@lru_cache
def covers(pattern: str, layer: int) -> bool:
    """Whether an override's pattern means this layer: its number, or a wildcard pattern of its experts' names.

    Such names are layers.I, layers.I.mlp, layers.I.mlp.experts, and those of checkpoints below: both of
    experts.{gate_up,down}_proj, or all of experts.E.{gate,up,down}_proj; each with or without "model." in front. A
    layer has one number format, so a pattern that covers a part of its experts or of their projections covers nothing.
    """
    if pattern == str(layer):
        return True
    fused = [f"experts.{name}_proj" for name in ("gate_up", "down")]
    # A pattern that takes every digit and one longer number takes every expert.
    single = [f"experts.{e}.{name}_proj" for e in range(11) for name in ("gate", "up", "down")]
    families = [[""], [".mlp"], [".mlp.experts"], [f".mlp.{n}" for n in fused], [f".mlp.{n}" for n in single]]
    return any(
        all(fnmatchcase(f"{root}layers.{layer}{name}", pattern) for name in names)
        for root in ("", "model.")
        for names in families
    )


DEFAULT_QUANTISED = "nvfp4_per_token"
RECIPES = {
    r.name: r
    for r in (
        Recipe("bf16", "bf16", "bf16", about="BF16 experts: nothing is quantised"),
        Recipe(
            "nvfp4_per_token", "nvfp4", "nvfp4", "row", "expert",
            about="W4A4; every token has its own outer scale, so no token sees its batch (the default when quantising)",
        ),
        Recipe(
            "nvfp4_per_row", "nvfp4", "nvfp4", "row", "row",
            about="W4A4; as nvfp4_per_token, and every row of a weight has its own outer scale",
        ),
        Recipe(
            "nvfp4_per_tensor", "nvfp4", "nvfp4", "tensor", "expert",
            about="W4A4 with one activation scale for the whole batch: NOT batch invariant, kept to show why it fails",
        ),
        Recipe("w4a16", "nvfp4", "bf16", "", "expert", about="4-bit weights, BF16 activations"),
        Recipe(
            "w4a8_mxfp8", "nvfp4", "mxfp8", "", "expert",
            about="4-bit weights, FP8 activations in blocks of 32 with power-of-two scales",
        ),
    )
}  # fmt: skip


def get(name: str) -> Recipe:
    """The named recipe. InputError offers the closest name."""
    if isinstance(name, str) and name in RECIPES:
        return RECIPES[name]
    begun = [one for one in RECIPES if name and one.startswith(str(name))]  # nvfp4: the default comes first
    close = begun or get_close_matches(str(name), RECIPES, n=1, cutoff=0.3)
    hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(RECIPES)}"
    raise InputError(f"recipe {name!r} is not known; {hint}")


def read_overrides(texts: Iterable[str]) -> list[tuple[str, str]]:
    """'PATTERN=RECIPE' arguments -> pairs. InputError on another form or an unknown recipe."""
    pairs = [text.partition("=")[::2] for text in texts]
    for text, (pattern, name) in zip(texts, pairs, strict=True):
        if not pattern or not name:
            raise InputError(f"{text!r} is not of the form PATTERN=RECIPE, such as 0=bf16")
        get(name)
    return pairs


def describe(recipe: Recipe) -> str:
    """Forward, backward, coverage and layout, as text of a few lines."""
    forward = {
        ("bf16", "bf16"): "BF16 x BF16, FP32 accumulator (the tensor-core chain), one rounding to BF16",
        ("nvfp4", "nvfp4"): "chain over code * block scale of both operands (exact in BF16), acc * (row * weight)",
        ("nvfp4", "bf16"): "chain over BF16 activations and code * block scale of the weight, FP32 acc * weight scale",
        ("nvfp4", "mxfp8"): "chain over code * scale of both operands (exact in BF16), then FP32 acc * weight scale",
    }[recipe.weights, recipe.activations]
    outer = {
        "row": "one a token",
        "tensor": "one for the whole batch",
        "expert": "one an expert (gate and up share it)",
        "": "none",
    }
    layout = {
        "bf16": "[E, N, K] BF16",
        "nvfp4": "codes uint8 [E, N, K/2] (even element in the low nibble), scales E4M3 [E, N, K/16], outer FP32",
    }[recipe.weights]
    weight_outer = "one a row" if recipe.weight_scale == "row" else outer[recipe.weight_scale]
    lines = [
        f"{recipe.name}: {recipe.about}",
        f"  forward   FC1 and FC2 of every expert: {forward}",
        f"            outer scale of activations: {outer[recipe.activation_scale]}",
        f"            outer scale of weights: {weight_outer}",
        f"  backward  {recipe.backward}: "
        + (
            "straight through, gradients of the saved high-precision operands\n"
            "            mxfp8 instead, to compare, is chosen in Python (no command computes gradients):\n"
            f"            model.set_recipe(get({recipe.name!r}).with_backward('mxfp8'))"
            if recipe.backward == "bf16"
            else "straight through, operands of the gradient products rounded to MXFP8 (to compare; not the default)"
        ),
        "  coverage  experts' gate_up and down; router, norms, embedding, attention, dense layers, lm_head stay BF16",
        f"  layout    {layout}",
    ]
    lines += [f"  override  {pattern} -> {name}" for pattern, name in recipe.overrides]
    return "\n".join(lines)
