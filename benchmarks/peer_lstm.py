"""The LSTM language model of `benchmarks.recoding` in PyTorch, recoded step by step."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.lstm_case import CLIP, RATE, SIZE, Case


class Peer:
  """The same model, losses and training step.

  Args:
    case: sizes and text.
    params: ours, which are copied.
    device: `cpu` or `gpu`.
  """

  def __init__(self, case: Case, params: Any, device: str):
    import torch

    self.case, self.torch = case, torch
    self.place = "cuda" if device == "gpu" else "cpu"
    self.lstm = torch.nn.LSTM(case.dim, case.dim, case.layers).to(self.place)
    self.embedding = torch.nn.Embedding(case.vocab, case.dim).to(self.place)
    self.decoder = torch.nn.Linear(case.dim, case.vocab).to(self.place)
    with torch.no_grad():
      self.embedding.weight.copy_(self._tensor(params["embedding"]))
      self.decoder.weight.copy_(self._tensor(params["decoder"][0]))
      self.decoder.bias.copy_(self._tensor(params["decoder_bias"][0]))
      for layer in range(case.layers):
        for ours, theirs in (("input", "weight_ih"), ("recurrent", "weight_hh")):
          weight = self._tensor(params[f"{ours}_{layer}"]).T
          getattr(self.lstm, f"{theirs}_l{layer}").copy_(weight)
        getattr(self.lstm, f"bias_ih_l{layer}").copy_(self._tensor(params[f"bias_{layer}"]))
        getattr(self.lstm, f"bias_hh_l{layer}").zero_()
    modules = (self.lstm, self.embedding, self.decoder)
    self.parameters = [p for module in modules for p in module.parameters()]
    self.tokens, self.targets = (torch.from_numpy(x).T.to(self.place) for x in case.text())

  def _tensor(self, value: Any) -> Any:
    return self.torch.from_numpy(np.array(value)).to(self.place)

  def plain_loss(self) -> Any:
    """Losses of a stretch."""
    hidden, _ = self.lstm(self.embedding(self.tokens))
    return self._losses(self.decoder(hidden), self.targets)

  def recoded_loss(self, train: bool = True) -> Any:
    """Losses of a stretch, states recoded by surprisal at every step.

    Without `train` no graph outlives its step, and parameters take part in none.
    """
    torch, case = self.torch, self.case
    zeros = torch.zeros(case.rows, case.dim, device=self.place)
    states = [(zeros, zeros)] * case.layers
    losses, words = [], self.embedding(self.tokens)
    for time in range(case.time):
      x, flat = words[time], []
      for layer, (h, c) in enumerate(states):
        gates = torch.nn.functional.linear(
          x, getattr(self.lstm, f"weight_ih_l{layer}"), getattr(self.lstm, f"bias_ih_l{layer}")
        ) + torch.nn.functional.linear(
          h, getattr(self.lstm, f"weight_hh_l{layer}"), getattr(self.lstm, f"bias_hh_l{layer}")
        )
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        c = c if c.requires_grad else c.requires_grad_()
        x = torch.sigmoid(o) * torch.tanh(c)
        flat += [x, c]
      nll = self._losses(self.decoder(x), self.targets[time])
      signal = torch.expm1(torch.exp(-nll) * nll)
      grads = torch.autograd.grad(signal.sum(), flat, retain_graph=train)
      moved = [part - SIZE * g for part, g in zip(flat, grads, strict=True)]
      moved = moved if train else [part.detach() for part in moved]
      states = list(zip(moved[::2], moved[1::2], strict=True))
      losses.append(nll if train else nll.detach())
    return torch.stack(losses)

  def _losses(self, logits: Any, targets: Any) -> Any:
    found = self.torch.nn.functional.cross_entropy(
      logits.flatten(0, -2), targets.flatten(), reduction="none"
    )
    return found.reshape(targets.shape)

  def evaluation(self, *, recode: bool) -> Callable[[], Any]:
    """A call that gives the losses of a stretch."""

    def run() -> Any:
      for parameter in self.parameters:
        parameter.requires_grad_(False)
      try:
        return self._done(self.recoded_loss(train=False) if recode else self.plain_loss())
      finally:
        for parameter in self.parameters:
          parameter.requires_grad_()

    return run

  def training(self, loss: Callable[[], Any]) -> Callable[[], Any]:
    """A call that makes a training step; the parameters stay as they are."""
    torch = self.torch

    def run() -> Any:
      grads = torch.autograd.grad(loss().mean(), self.parameters)
      norm = torch.sqrt(sum((g.square().sum() for g in grads), torch.zeros((), device=self.place)))
      scale = torch.clamp(CLIP / norm, max=1.0) * RATE
      with torch.no_grad():
        return self._done([p - scale * g for p, g in zip(self.parameters, grads, strict=True)])

    return run

  def _done(self, result: Any) -> Any:
    if self.place == "cuda":
      self.torch.cuda.synchronize()
    return result
