"""Lets SGLang read an NVFP4 checkpoint on a CPU, with its own config classes, model, parameters and loader, and writes
down what it made of it. Runs in SGLang's environment: python read_nvfp4.py CHECKPOINT OUT BACKEND [pretend]

OUT       safetensors: every parameter after loading as `loaded.NAME`, and what SGLang derives of the experts' for its
          kernels as `derived.NAME`; E4M3 as bytes. Metadata: `methods` (module -> its quantisation method) and
          `stopped`, the error that ended the derivation ("" if none did)
BACKEND   SGLang's --moe-runner-backend
pretend   SGLang's question whether the GPU is a Blackwell is answered with yes. Without it a CPU is refused where the
          method is made, before any parameter (but for ModelOpt with the backend marlin)

Before loading every parameter is filled with 0xA5 or NaN, so that an element that nobody loads shows.
"""

import json
import os
import sys
import tempfile

import torch
from safetensors.torch import save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4_moe
from sglang.srt.model_loader import loader
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

LEFT_ALONE = 0xA5


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.detach()


def build(path: str, backend: str):
    """(SGLang's ModelConfig, its empty model, its DefaultModelLoader)."""
    arguments = ServerArgs(
        model_path=path, device="cpu", moe_runner_backend=backend, attention_backend="torch_native",
        skip_tokenizer_init=True, disable_overlap_schedule=True,
    )  # fmt: skip
    set_global_server_args_for_scheduler(arguments)
    initialize_moe_config(arguments)
    config = ModelConfig.from_server_args(arguments)
    meeting = "file://" + os.path.join(tempfile.mkdtemp(), "meeting")
    init_distributed_environment(1, 0, meeting, 0, "gloo")
    initialize_model_parallel()
    initialize_dp_attention(arguments, config)
    files = loader.DefaultModelLoader(LoadConfig())
    with loader.set_default_torch_dtype(config.dtype):
        quantisation = loader._get_quantization_config(config, files.load_config)
        model = loader._initialize_model(config, files.load_config, quantisation)
    return config, model, files


def derive(model) -> tuple[dict[str, torch.Tensor], str]:
    """What process_weights_after_loading leaves of every quantised layer, until it asks for what a CPU lacks."""
    found = {}
    for name, module in model.named_modules():
        if not hasattr(module, "w13_weight_scale"):
            continue
        try:
            module.quant_method.process_weights_after_loading(module)
        except Exception as error:
            return found, f"{name}: {type(error).__name__}: {error}"
        found |= {f"derived.{name}.{key}": as_bytes(p).clone() for key, p in module.named_parameters()}
    return found, ""


def main(path: str, out: str, backend: str, *options: str) -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # swizzle_blockscale is torch but for its last call
    if "pretend" in options:
        modelopt_quant.is_blackwell_supported = lambda *args: True
        compressed_tensors_w4a4_nvfp4_moe.is_blackwell_supported = lambda *args: True
    config, model, files = build(path, backend)
    for parameter in model.parameters():
        raw = as_bytes(parameter)
        raw.fill_(LEFT_ALONE if raw.dtype == torch.uint8 else torch.nan)
    model.load_weights(files._get_all_weights(config, model))
    found = {f"loaded.{name}": as_bytes(p).clone() for name, p in model.named_parameters()}
    methods = {
        name: type(getattr(module, "scheme", None) or module.quant_method).__name__
        for name, module in model.named_modules()
        if getattr(module, "quant_method", None) is not None
    }
    derived, stopped = derive(model)
    tensors = {name: tensor.contiguous() for name, tensor in (found | derived).items()}
    save_file(tensors, out, {"methods": json.dumps(methods), "stopped": stopped})


if __name__ == "__main__":
    main(*sys.argv[1:])
