"""Say what a recipe computes: forward, backward, which weights it covers, how they are laid out.

Example:
  minitransformer describe nvfp4_per_token
"""

import argparse

from minitransformer.recipe import describe, get


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="a name that `minitransformer recipes` lists")


def run(args: argparse.Namespace) -> int:
    print(describe(get(args.recipe)))
    return 0
