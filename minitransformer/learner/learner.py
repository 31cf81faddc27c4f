"""The learner: scores completions and updates the model's weights in place, through the sampler's own operators.

An update is: pack -> model -> logprob -> loss -> backward, pack after pack -> norm -> AdamW -> weights. Its roundings:

    loss         the derivative of a token's loss (losses.py), FP32, divided by the number of tokens of the update
    gradients    BF16 from the model; summed over packs and measured in gradients.py
    masters      FP32, by adamw/1 (ops/adamw.py), which clips and writes the weights too
    weights      BF16 of the masters, nearest even, in the model's own storage; weights_version + 1

With the same packs an update has the same bits on every device, and so has a run that is saved on one and resumed on
another. Other packs change no log-prob, no loss and no token's weight in it, but a weight gradient is one chain over
the tokens in packed order, so they may change a gradient's last bits.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from os import PathLike

import torch
from torch import Tensor

from minitransformer.devices import naming_memory
from minitransformer.errors import InputError
from minitransformer.integers import as_list, integer
from minitransformer.learner import arguments, checkpoint, gradients, scoring
from minitransformer.learner.losses import Loss, PolicyGradient, counted
from minitransformer.learner.metrics import UpdateMetrics, metrics
from minitransformer.learner.optimizer import Optimizer
from minitransformer.learner.packing import Pack, Sample, pack, unpack
from minitransformer.weights_stamp import WeightsStamp

_LESS = "nothing was updated; lower max_tokens_per_pack, set recompute or freeze parameters"
_TORN = "an update or a load broke off: some masters and weights are new, others are not; load a saved run"


class Learner:
    """Owns the FP32 masters and the optimizer state of one model, and nothing of its forward pass.

    frozen: patterns ('layers.*.attn.qkv.weight') of parameters to leave alone; one that matches nothing is an error.
    max_grad_norm: None never clips. max_tokens_per_pack bounds the tokens of one forward pass. recompute: keep only
    each layer's input and compute the layer again in the backward pass; less memory, the same bits.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
        recompute: bool = False,
        frozen: Sequence[str] = (),
        max_tokens_per_pack: int = 1024,
    ) -> None:
        if max_grad_norm is not None:
            max_grad_norm = arguments.number("max_grad_norm", max_grad_norm)
            if not 0 < max_grad_norm < math.inf:
                raise InputError(f"max_grad_norm {max_grad_norm} must be positive and finite, or None for no clipping")
        if (tokens := integer(max_tokens_per_pack)) is None or tokens < 1:
            raise InputError(f"max_tokens_per_pack {max_tokens_per_pack} must be an integer of at least 1")
        self.model, self.recompute = model, recompute
        self.max_grad_norm, self.max_tokens_per_pack = max_grad_norm, tokens
        self.parameters, self.frozen = arguments.split(dict(model.named_parameters()), frozen)
        self.optimizer = Optimizer(self.parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._torn = False  # masters and weights are being written, or that broke off
        self._written = self._stamp()

    @property
    def masters(self) -> dict[str, Tensor]:
        """FP32 copies of the trained weights by name."""
        return self.optimizer.masters

    @property
    def step(self) -> int:
        """How many updates the masters have seen."""
        return self.optimizer.step

    @property
    def lr(self) -> float:
        """The learning rate of the next update; a schedule sets it. InputError unless finite and at least 0."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
        temperature: float | Sequence[float] = 1.0,
        trace=None,
        request_ids: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """FP32 [completion_len] a sequence: the log-probs in nats of its completion, in packed passes, no autograd.

        temperature: one for all or one a sequence; the logits are divided by it. 0 stands for greedy and divides by
        1, as in SamplingParams. trace: takes the rows of every stage under request_ids (default: 0, 1, ...).
        Raises InputError, naming the sequence, for bad input, and the position too for values that are not finite.
        """
        sequences, prompt_lens = as_list("sequences", sequences), as_list("prompt_lens", prompt_lens)
        packs = self._pack(sequences, prompt_lens)
        temperatures = arguments.temperatures(temperature, len(sequences))
        names = arguments.request_ids(request_ids, len(sequences))
        scores = []
        with torch.no_grad(), naming_memory(f"packs of {self.max_tokens_per_pack} tokens", "lower max_tokens_per_pack"):
            for one in packs:
                named = replace(one.batch, request_ids=tuple(names[s] for s in one.sequences))
                scores.append(self._log_probs(replace(one, batch=named), temperatures, trace))
        found = unpack(packs, scores)
        if trace is not None:
            for s, log_probs_L in enumerate(found):
                positions = range(int(prompt_lens[s]), int(prompt_lens[s]) + len(log_probs_L))
                trace.note_log_probs(names[s], positions, log_probs_L)
        return found

    def update(self, samples: Sequence[Sample], loss: Loss | None = None) -> UpdateMetrics:
        """One optimizer step on the mean of the loss (default PolicyGradient()) over all samples' counted tokens.

        Raises InputError for a bad sample, a loss that returns something else than losses.py says, or activations that
        are not finite, naming the sequence and the position, and FloatingPointError for a loss or gradient that is not
        finite, naming the sample or the first such parameter;
        then masters, optimizer state and weights are what they were. So they are after an InputError for a GPU's
        memory. Only where something else breaks AdamW off (a signal, a GPU that fails) are they not; then this learner
        refuses to go on before a saved run is loaded.
        """
        loss = PolicyGradient() if loss is None else loss
        samples = arguments.samples(samples)
        self._refuse_foreign_weights()
        temperatures = arguments.temperatures([s.temperature for s in samples], len(samples))
        packs = self._pack([s.ids for s in samples], [s.prompt_len for s in samples])
        masks = [sample.counted(f"sample {s}") for s, sample in enumerate(samples)]
        tokens = sum(int(mask_L.sum()) for mask_L in masks)
        if not tokens:
            raise InputError("the masks of all samples leave no token to learn from; drop these samples")
        self.optimizer.refuse_without_room()
        totals: dict[str, Tensor] = {}
        log_probs, outputs = {}, {}
        try:
            with naming_memory(f"passes of packs of {self.max_tokens_per_pack} tokens, with gradients", _LESS):
                for one in packs:
                    log_probs_L = self._log_probs(one, temperatures)
                    rows = log_probs_L.detach().cpu().split([b - a for a, b in pairwise(one.bounds)])
                    for s, lp_L in zip(one.sequences, rows, strict=True):
                        log_probs[s] = lp_L
                        outputs[s] = counted(loss(lp_L.clone(), samples[s], f"sample {s}"), masks[s], f"sample {s}")
                    grad_L = torch.cat([outputs[s].grad_L for s in one.sequences]) / tokens
                    log_probs_L.backward(grad_L.to(log_probs_L.device))
                    gradients.accumulate(totals, self.parameters)
                norm, clip = gradients.measure(totals, self.parameters, self.max_grad_norm)
        finally:
            gradients.drop(self.parameters)
        self._apply(totals, clip)
        done = [(sample, log_probs[s], outputs[s]) for s, sample in enumerate(samples)]
        return metrics(done, grad_norm=norm, packs=len(packs), step=self.step)

    def save(self, path: str | PathLike) -> None:
        """Writes one safetensors file with all that an exact resume needs (see checkpoint.py); atomic."""
        self._refuse_replaced_parameters()
        self._refuse_torn()
        checkpoint.save(self, path)

    def load(self, path: str | PathLike) -> None:
        """Takes up a saved run: masters, optimizer state, step, learning rate, and the model's weights from them.

        Raises InputError, naming the entry, if the file is incomplete or belongs to another model, other frozen weights
        or other settings; then nothing has changed.
        """
        self._refuse_replaced_parameters()
        checkpoint.load(self, path)
        self.write_weights()
        self._torn = False

    @torch.no_grad()
    def write_weights(self) -> None:
        """Rounds the masters into the model's own storage (addresses stay) and outdates every prefix cache."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])  # FP32 -> BF16, nearest even
        self.model.weights_version += 1
        self._written = self._stamp()

    def sync(self, to, **options):
        """Sends the weights to an SGLang server and proves that they are there; see plugins/sglang/sync.py.

        to: 'http://host:port', a launch.Server or an sglang.Engine. -> SyncReport; InputError if not proven equal.
        """
        from minitransformer.plugins.sglang.sync import sync

        self._refuse_torn()
        return sync(self, to, **options).require_equal()

    def _stamp(self) -> dict[str, WeightsStamp]:
        return {name: WeightsStamp([p]) for name, p in self.parameters.items()}

    def _pack(self, sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int]) -> list[Pack]:
        config = self.model.config
        packs = pack(sequences, prompt_lens, self.max_tokens_per_pack, config.vocab_size, config.max_positions)
        return [one.to(self.model.device) for one in packs]

    def _log_probs(self, one: Pack, temperatures: Sequence[float], trace=None) -> Tensor:
        return scoring.log_probs(self.model, one, temperatures, trace, self.recompute and torch.is_grad_enabled())

    def _refuse_replaced_parameters(self) -> None:
        now = dict(self.model.named_parameters())
        for name, parameter in (self.parameters | self.frozen).items():
            if now.get(name) is not parameter:
                raise InputError(f"{name} of the model is no longer the parameter it was: make a new Learner")

    def _refuse_foreign_weights(self) -> None:
        """As far as WeightsStamp sees them: not what is written through .data or NumPy."""
        self._refuse_replaced_parameters()
        self._refuse_torn()
        for name, stamp in self._stamp().items():
            if stamp != self._written[name]:
                raise InputError(f"{name} was written by someone else: the masters are stale, make a new Learner")

    def _refuse_torn(self) -> None:
        if self._torn:
            raise InputError(_TORN)

    def _apply(self, totals: dict[str, Tensor], clip: float) -> None:
        with naming_memory("making masters and moments in FP32", _LESS):
            self.optimizer.make_state()
        self._torn = True
        self.model.weights_version += 1  # before the first write: caches of the old weights are stale from here
        self.optimizer.apply(totals, clip)
        self._written = self._stamp()
        self._torn = False
