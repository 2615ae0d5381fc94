"""Recoding an LSTM language model beside the same model without, and beside PyTorch's.

    python -m benchmarks.recoding [--quick] [--json FILE] [--check] [--device gpu]

Needs the environment of `make test-peers`. Two layers of width 650, 10,000 words, 64 streams, 35
tokens (Ulmer 2019's model), float32. Evaluation: losses of a stretch. Training: gradient of the
mean loss, clipping and a step of SGD. PyTorch's plain model is `torch.nn.LSTM`, its recoding one
written with `torch.autograd.grad`, step by step. The floors are arithmetic: floating-point
operations with recoding over those without. In full about ten minutes on 2 cores.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import common
from compmod_jax.mechanisms.recoding_config import RecodingConfig
from compmod_jax.models.lstm_lm import Given, LstmConfig, LstmLM

ROUNDS = 20
SIZE, CLIP, RATE = 5.0, 0.25, 20.0
SAMPLES = (1, 4, 8)


@dataclasses.dataclass(frozen=True)
class Case:
  """Sizes of the model and of a stretch."""

  rows: int = 64
  time: int = 35
  dim: int = 650
  vocab: int = 10_000
  layers: int = 2

  @property
  def tokens(self) -> int:
    """Tokens of a call."""
    return self.rows * self.time

  def text(self) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and targets, [rows, time] each."""
    random = np.random.default_rng(0)
    shape = (self.rows, self.time)
    return random.integers(self.vocab, size=shape), random.integers(self.vocab, size=shape)

  def model(self, **recoding: Any) -> LstmLM:
    """The model with this recoding."""
    config = LstmConfig(
      layers=self.layers,
      dim=self.dim,
      embedding_dim=self.dim,
      dropout=0.0,
      recoding=RecodingConfig(**{"size": SIZE, **recoding}),
    )
    return LstmLM(config, self.vocab)

  def params(self) -> Any:
    """Parameters that all variants have in common."""
    model = self.model()
    tokens = jnp.zeros((1, 1), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens, tokens, model.initial_states(1))
    return nn.unbox(variables)["params"]

  def floors(self) -> dict[str, float]:
    """Operations with recoding over those without, from the sizes of all products."""
    cells = 2 * 4 * self.dim * 2 * self.dim * self.layers
    logits = 2 * self.dim * self.vocab
    back = 2 * 4 * self.dim * self.dim * (self.layers - 1)
    plain = cells + logits
    found = {
      "evaluation": (plain + logits + back) / plain,
      "training": (3 * plain + back) / (3 * plain),
      "training through": (3 * plain + 3 * logits + 3 * back) / (3 * plain),
    }
    for k in SAMPLES:
      # The recoded state makes the prediction, by a product more.
      found[f"entropy of {k}"] = (cells + back + (2 * k + 1) * logits) / plain
    return found


def evaluation(case: Case, params: Any, **recoding: Any) -> Callable[[], Any]:
  """A call that gives the losses of a stretch."""
  model, (tokens, targets) = case.model(**recoding), map(jnp.asarray, case.text())
  states = model.initial_states(case.rows)

  def losses(params: Any) -> Any:
    given = Given(noise=jax.random.key(0))
    out: Any = model.apply({"params": params}, tokens, targets, states, given=given)
    return out.nll, out.states

  jitted = jax.jit(losses)
  return lambda: jax.block_until_ready(jitted(params))


def training(case: Case, params: Any, **recoding: Any) -> Callable[[], Any]:
  """A call that makes a training step from the same parameters."""
  model, (tokens, targets) = case.model(**recoding), map(jnp.asarray, case.text())
  states = model.initial_states(case.rows)
  optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.sgd(RATE))

  def step(params: Any) -> Any:
    def loss(params: Any) -> Any:
      out: Any = model.apply({"params": params}, tokens, targets, states)
      return jnp.mean(out.nll), out.states

    (value, last), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, _ = optimizer.update(grads, optimizer.init(params))
    return optax.apply_updates(params, updates), value, last

  jitted = jax.jit(step)
  return lambda: jax.block_until_ready(jitted(params))


class Peer:
  """The same model in PyTorch."""

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


def main() -> None:
  options = common.options(__doc__).parse_args()
  report = common.start("Recoding of an LSTM language model", options)
  case = sizes(options)
  params, floors = case.params(), case.floors()
  peer = Peer(case, params, options.device)
  check_agreement(report, case, params, peer)
  gpu = options.device == "gpu"

  seconds = report.measure(
    "evaluation",
    {
      "plain": evaluation(case, params),
      "surprisal": evaluation(case, params, signal="surprisal"),
      "PyTorch plain": peer.evaluation(recode=False),
      "PyTorch surprisal": peer.evaluation(recode=True),
    },
    ROUNDS,
    amount=case.tokens,
    unit="tokens",
  )
  plain = seconds["plain"]
  most = 3.0 if gpu else 1.85
  report.claim("evaluation: surprisal / plain", seconds["surprisal"], plain, at_most=most)
  report.claim(
    "evaluation: PyTorch surprisal / plain", seconds["PyTorch surprisal"], seconds["PyTorch plain"]
  )
  report.claim("evaluation: ours / PyTorch, plain", plain, seconds["PyTorch plain"])

  calls = {"plain": evaluation(case, params)}
  for k in SAMPLES:
    how = {"signal": "entropy"} if k == 1 else {"signal": "mc_dropout", "samples": k}
    calls[f"entropy of {k}"] = evaluation(case, params, **how)
  seconds = report.measure("entropy", calls, ROUNDS, amount=case.tokens, unit="tokens")
  for k in SAMPLES:
    name = f"entropy of {k}"
    # The target leaves the prediction's product out; with few samples it is below the floor.
    floor = (17 + 26 * k) / 26.5
    most = round((1.5 if gpu else 1.3) * floor, 2)
    report.claim(f"evaluation: {name} / plain", seconds[name], seconds["plain"], at_most=most)

  seconds = report.measure(
    "training",
    {
      "plain": training(case, params),
      "surprisal": training(case, params, signal="surprisal"),
      "surprisal, through": training(case, params, signal="surprisal", through=True),
      "PyTorch plain": peer.training(peer.plain_loss),
      "PyTorch surprisal": peer.training(peer.recoded_loss),
    },
    ROUNDS,
    amount=case.tokens,
    unit="tokens",
  )
  plain = seconds["plain"]
  limits = {"surprisal": 2.0 if gpu else 1.15, "surprisal, through": 2.5 if gpu else 1.75}
  for name, most in limits.items():
    report.claim(f"training: {name} / plain", seconds[name], plain, at_most=most)
  report.claim(
    "training: PyTorch surprisal / plain", seconds["PyTorch surprisal"], seconds["PyTorch plain"]
  )
  report.claim("training: ours / PyTorch, plain", plain, seconds["PyTorch plain"], at_most=0.9)
  for name, floor in floors.items():
    report.note(f"floor by arithmetic, {name}: {floor:.2f}")
  report.finish()


def check_agreement(report: common.Report, case: Case, params: Any, peer: Peer) -> None:
  """Checks that both compute the same losses."""
  for name, signal, theirs in (
    ("plain", "none", peer.evaluation(recode=False)),
    ("surprisal", "surprisal", peer.evaluation(recode=True)),
  ):
    ours = np.asarray(evaluation(case, params, signal=signal)()[0])
    difference = float(np.abs(ours - theirs().cpu().numpy().T).max())
    report.note(f"losses of {name}: differ from PyTorch's by {difference:.1e} nats at most")
    if difference > 1e-3:
      raise RuntimeError(f"losses of {name} differ")


def sizes(options: argparse.Namespace) -> Case:
  """What is measured."""
  return Case(rows=8, time=10, dim=64, vocab=500) if options.quick else Case()


if __name__ == "__main__":
  main()
