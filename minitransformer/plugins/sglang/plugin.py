"""The entry point that SGLang calls in each of its processes, and what it puts into SGLang.

SGLang logs the exception of a plugin and goes on without it, so every failure here is a SystemExit with one sentence.
For the same reason the changes are plain assignments, which raise, and not SGLang's hooks, which log.
"""

import functools
import logging
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, NoReturn

from minitransformer.errors import InputError
from minitransformer.plugins.sglang import (
    ANY_VERSION_VARIABLE,
    MODEL_PACKAGE,
    MODEL_PACKAGE_VARIABLE,
    TESTED_VERSION,
)

NAME, GROUP = "minitransformer", "sglang.srt.plugins"
ATTENTION = "minitransformer"  # on the CPU SGLang's allocators are chosen by the name torch_native
log = logging.getLogger("minitransformer")
_active = False


def wanted() -> bool:
    return os.environ.get(MODEL_PACKAGE_VARIABLE) == MODEL_PACKAGE


def plugin() -> None:
    """Entry point of the group sglang.srt.plugins. Does nothing unless the environment asks for our model."""
    if not wanted():
        value = os.environ.get(MODEL_PACKAGE_VARIABLE, "")
        if "minitransformer" in value.lower():  # SGLang would find no model there, and serve its own
            fail(f"{MODEL_PACKAGE_VARIABLE} is {value!r}; set it to {MODEL_PACKAGE}")
        return
    try:
        check_version()
        activate()
    except Exception as error:
        fail(f"{type(error).__name__}: {error}" if not isinstance(error, InputError) else str(error))


def fail(why: str) -> NoReturn:
    """Ends the process: a server that was asked for our model must not serve another."""
    raise SystemExit(f"miniTransformer is not live, so this server stops: {why}")


def sglang_version() -> str:
    """The installed version. InputError if there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise InputError(
            f"SGLang is not installed; `pip install 'minitransformer[sglang]'` installs {TESTED_VERSION}"
        ) from None


def check_version() -> None:
    """InputError unless this is the tested SGLang, or the user allows another."""
    found = sglang_version()
    if found != TESTED_VERSION and os.environ.get(ANY_VERSION_VARIABLE) != "1":
        raise InputError(
            f"SGLang {found} is installed, {TESTED_VERSION} was tested; install that, or set {ANY_VERSION_VARIABLE}=1 "
            "and run the laws (make test-sglang) before you trust a log-prob"
        )


def missing() -> str | None:
    """Why SGLang would not find and call the entry point, or must not; None if it will."""
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and NAME not in allowed:
        return f"SGLANG_PLUGINS={','.join(allowed)} leaves its plugin out; add {NAME}"
    if not entry_points(group=GROUP, name=NAME):
        return (
            "its package is on the path but not installed, so SGLang can't find its plugin; `pip install` it (an old "
            "minitransformer.egg-info in the working directory hides an installed one: remove it)"
        )
    try:
        check_version()
    except InputError as error:
        return str(error)
    return None


def require_installed() -> None:
    """SystemExit unless SGLang will find and call the entry point."""
    if why := missing():
        fail(why)


def require_active() -> None:
    """SystemExit unless `activate` has run to its end in this process."""
    if not _active:
        fail(f"SGLang did not run the plugin {NAME}; its log says why (a plugin that fails is only logged)")


def activate() -> None:
    """Puts our parts into SGLang, once a process."""
    global _active
    if _active:
        return
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers import sampler
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.managers.tp_worker import BaseTpWorker
    from sglang.srt.mem_cache.allocator import paged
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs, add_attention_backend_choices
    from sglang.srt.state_capturer.base import BaseHostCache
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.utils.weight_checker import WeightChecker

    from minitransformer.plugins.sglang import arguments, batch, cpu, group, logits, weights

    add_attention_backend_choices([ATTENTION])
    for name in (ATTENTION, "torch_native"):
        attention_registry.register_attention_backend(name)(batch.AttentionBackend)
    sampler.register_sampler_backend("pytorch", logits.Sampler)
    _wrap(ServerArgs, "__post_init__", arguments.post_init)
    _wrap(ModelConfig, "_parse_quant_hf_config", arguments.unquantised)
    _wrap(TokenizerManager, "_validate_one_request", arguments.validate)
    _wrap(TokenizerManager, "_create_tokenized_object", arguments.tokenized)
    _wrap(SamplingParams, "verify", arguments.verify)
    _wrap(SamplingBatchInfo, "from_schedule_batch", logits.with_seeds)
    _wrap(ModelRunner, "init_cuda_graphs", batch.with_prefills)
    _wrap(Scheduler, "process_batch_result", logits.before_results)
    _wrap(BaseTpWorker, "_deserialize_own_rank", weights.readable)
    for route in ("tensor", "disk", "distributed"):
        _wrap(weight_updater.WeightUpdater, f"update_weights_from_{route}", getattr(weights, f"from_{route}"))
    # A scheduler waits there for a sender that does not come: not for SGLang's half an hour.
    weight_updater.init_custom_process_group = functools.partial(group.of_server, init_custom_process_group)
    if not torch.cuda.is_available():
        _wrap(BaseHostCache, "__init__", cpu.host_cache)
        paged.alloc_extend_kernel = cpu.Kernel(cpu.alloc_extend)
        paged.alloc_decode_kernel = cpu.Kernel(cpu.alloc_decode)
    _wrap(WeightChecker, "handle", weights.answer)
    _active = True


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """owner.name becomes wrapper(original, ...). InputError if this SGLang has no such method."""
    raw = owner.__dict__.get(name)
    if raw is None:
        raise InputError(f"SGLang {sglang_version()} has no {owner.__name__}.{name}, which miniTransformer replaces")
    original = raw.__func__ if isinstance(raw, classmethod) else raw

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, classmethod(wrapped) if isinstance(raw, classmethod) else wrapped)
