"""The class that SGLang finds under the architecture Qwen3MoeForCausalLM: our model behind SGLang's interface."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minitransformer.errors import InputError
from minitransformer.plugins.sglang import plugin


class Qwen3MoeForCausalLM(nn.Module):
    """config: SGLang's copy of config.json; ours is read from the file, because a key that is left out matters."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        plugin.require_active()
        from sglang.srt.runtime_context import get_server_args

        from minitransformer.plugins.sglang.arguments import RECIPE
        from minitransformer.plugins.sglang.build import build, require_capturable
        from minitransformer.plugins.sglang.logits import LogitsProcessor
        from minitransformer.plugins.sglang.weights import Receiver

        self.config = config
        try:
            args, recipe = get_server_args(), getattr(config, RECIPE, None)
            self.model, form = build(args.model_path, recipe, torch.get_default_device())
            if args.cuda_graph_config.decode.backend != "disabled":
                require_capturable(self.model)
        except InputError as error:
            plugin.fail(str(error))
        self.receiver, self.live, self.prefills = Receiver(self.model, form), False, None
        self.logits_processor = LogitsProcessor(config, self.model)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self.live:  # an update: whoever sent it is answered
            self._in_float32(lambda: self.receiver.load(weights, update=True))
            return
        try:
            self._in_float32(lambda: self.receiver.load(weights, update=False))
        except InputError as error:
            plugin.fail(str(error))
        self._go_live()

    def post_load_weights(self) -> None:
        """SGLang calls it with --load-format dummy alone: its small random values are there, and none of a file."""
        self._in_float32(self.receiver.refresh)
        plugin.log.warning("no weights yet: what is served means nothing until an update brings all of them")
        self._go_live()

    def _go_live(self) -> None:
        self.live, spec = True, self.model.spec
        plugin.log.info(
            "miniTransformer is live: spec %s, fingerprint %s, recipe %s, SGLang %s",
            spec.name, spec.fingerprint(), self.model.recipe.name, plugin.sglang_version(),
        )  # fmt: skip

    def _in_float32(self, change: Callable[[], None]) -> None:
        """With torch's own default type: SGLang's, BF16 while it loads, is not what operators make new tensors of."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            change()
        finally:
            torch.set_default_dtype(default)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **_: Any) -> Any:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        from minitransformer.plugins.sglang.routed import noting

        backend = get_attn_backend()
        if backend.batch is None:  # an idle step
            hidden_TD = self.model.embed_tokens.weight.new_empty(0, self.model.config.hidden_size)
        else:
            hidden_TD = backend.hidden(self.model, forward_batch, noting())
        return self.logits_processor(input_ids, hidden_TD, None, forward_batch)


EntryClass = Qwen3MoeForCausalLM
