"""Hugging Face's GPT-2, to train and to generate with; needs PyTorch and transformers."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from compmod_jax.training.optimizer import OptimizerConfig

if TYPE_CHECKING:
  from benchmarks.nemot import Case


class Theirs(NamedTuple):
  """Hugging Face's model, and the same calls."""

  case: "Case"
  model: Any
  optimizer: OptimizerConfig
  pad: int

  def step(self, *, compiled: bool) -> Callable[[], Any]:
    """A call that makes one training step and returns its loss."""
    import torch
    import torch.nn.functional as F

    model, c = copy.deepcopy(self.model).train(), self.optimizer
    groups = [
      {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": c.weight_decay},
      {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    rates = {"lr": c.learning_rate, "betas": (c.b1, c.b2), "eps": c.eps}
    optimizer = torch.optim.AdamW(groups, **rates, fused=True)
    tokens = torch.from_numpy(self.case.batch()["tokens"]).long()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

    def loss(inputs: Any, targets: Any) -> Any:
      return F.cross_entropy(model(inputs, use_cache=False).logits.flatten(0, 1), targets)

    loss = torch.compile(loss) if compiled else loss

    def run() -> Any:
      optimizer.zero_grad(set_to_none=True)
      value = loss(inputs, targets)
      value.backward()
      optimizer.step()
      return value.detach().item()

    return run

  def forward(self, *, compiled: bool) -> Callable[[], Any]:
    """A call that gives the logits of a batch."""
    import torch

    inputs = torch.from_numpy(self.case.batch()["tokens"]).long()[:, :-1].contiguous()
    model = torch.compile(self.model) if compiled else self.model

    def run() -> Any:
      with torch.no_grad():
        return model(inputs, use_cache=False).logits

    return run

  def generation(self, rows: int) -> Callable[[], Any]:
    """A call that goes on from prompts: tokens [rows, new]."""
    import torch

    prompts = torch.from_numpy(self.case.prompts(rows)).long()
    options = {"max_new_tokens": self.case.new, "do_sample": False, "pad_token_id": self.pad}

    def run() -> Any:
      with torch.no_grad():
        found = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
      return found[:, self.case.length :].numpy()

    return run


def random_gpt2(case: "Case", *, positions: int, empty: int) -> Any:
  """A GPT-2 with random weights; the vector of the token `empty` is zero."""
  import torch
  from transformers import GPT2Config, GPT2LMHeadModel

  torch.manual_seed(0)
  config = GPT2Config(
    vocab_size=case.vocab,
    n_positions=positions,
    n_embd=case.dim,
    n_layer=case.layers,
    n_head=case.heads,
    activation_function="gelu_pytorch_tanh",  # GPT-2's GELU as one operation
    attn_pdrop=0.0,
    initializer_range=0.05,  # larger than usual: texts do not repeat one token
    bos_token_id=None,
    eos_token_id=None,
  )
  model = GPT2LMHeadModel(config).eval()
  with torch.no_grad():
    model.transformer.wte.weight[empty] = 0
  return model
