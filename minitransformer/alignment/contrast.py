"""What ordinary execution does: the same tokens scored by transformers in BF16. transformers is optional."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from minitransformer.checkpoint_files import read_json
from minitransformer.errors import InputError


class NotRun(RuntimeError):
    """The contrast could not be computed; the message says why."""


@torch.no_grad()
def score_with_transformers(
    checkpoint: str | Path, sequences: Sequence[Sequence[int]], starts: Sequence[int], temperatures: Sequence[float]
) -> list[Tensor]:
    """FP32 log-probs of tokens starts[i].. of each sequence, from transformers' own model of this checkpoint in BF16.

    One sequence a pass; its BF16 logits go through an FP32 log-softmax at its own temperature. Raises NotRun.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the checkpoint is local; nothing is to be looked up
    try:
        import transformers
    except ImportError as error:
        raise NotRun("transformers is not installed (pip install 'minitransformer[oracle]')") from error
    if _is_nvfp4(checkpoint):
        raise NotRun("transformers does not read NVFP4; align the BF16 checkpoint")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.bfloat16).eval()
        return [
            _score(model, torch.tensor(ids), start, temperature)
            for ids, start, temperature in zip(sequences, starts, temperatures, strict=True)
        ]
    except Exception as error:  # another project's code: whatever it raises, the alignment itself is not touched
        said = str(error).strip().partition("\n")[0][:120]  # a MemoryError says nothing
        raise NotRun(f"transformers raised {type(error).__name__}{said and ': ' + said}") from error


def _is_nvfp4(checkpoint: str | Path) -> bool:
    try:
        config = read_json(Path(checkpoint) / "config.json")
    except InputError as error:
        raise NotRun(f"transformers can't load it: {error}") from None
    return (
        bool(isinstance(config, dict) and config.get("quantization_config"))
        or (Path(checkpoint) / "hf_quant_config.json").exists()
    )


def _score(model: torch.nn.Module, ids_T: Tensor, start: int, temperature: float) -> Tensor:
    logits_TV = model(input_ids=ids_T[None]).logits[0, start - 1 : -1].float() / temperature
    return logits_TV.log_softmax(-1).gather(1, ids_T[start:, None])[:, 0]
