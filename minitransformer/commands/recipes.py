"""List the recipes: the number formats that the experts can be computed in.

Example:
  minitransformer recipes
"""

import argparse

from minitransformer.recipe import RECIPES


def add_arguments(command: argparse.ArgumentParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> int:
    width = max(map(len, RECIPES))
    for recipe in RECIPES.values():
        print(f"{recipe.name:{width}}  {recipe.about}")
    return 0
