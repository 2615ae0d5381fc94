"""Recoding an LSTM language model beside the same model without, and beside PyTorch's.

    python -m benchmarks.recoding [--quick] [--json FILE] [--check] [--device gpu]

Needs the environment of `make test-peers`. Two layers of width 650, 10,000 words, 64 streams, 35
tokens (Ulmer 2019's model), float32. Evaluation: losses of a stretch, also of 256 streams, whose
products read each weight a quarter as often. Training: gradient of the mean loss, clipping and a
step of SGD. PyTorch's plain model is `torch.nn.LSTM`, its recoding one written with
`torch.autograd.grad`, step by step. The floors are arithmetic: floating-point operations with
recoding over those without. Bare products of both libraries are timed, too. In full about ten
minutes on 2 cores.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import common, products
from benchmarks.lstm_case import CLIP, RATE, SAMPLES, Case
from benchmarks.peer_lstm import Peer
from compmod_jax.models.lstm_lm import Given

ROUNDS = 20


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


def main() -> None:
  options = common.options(__doc__).parse_args()
  report = common.start("Recoding of an LSTM language model", options)
  case = sizes(options)
  params = case.params()
  peer = Peer(case, params, options.device)
  check_agreement(report, case, params, peer)
  compare_evaluation(report, case, params, peer)
  compare_wide_evaluation(report, case, params)
  compare_entropies(report, case, params)
  compare_training(report, case, params, peer)
  if options.device == "cpu":
    products.compare(report, case.products())
  for name, floor in case.floors().items():
    report.note(f"floor by arithmetic, {name}: {floor:.2f}")
  report.finish()


def compare_evaluation(report: common.Report, case: Case, params: Any, peer: Peer) -> None:
  """Losses of a stretch, with recoding and without, by both."""
  runs = {
    "plain": evaluation(case, params),
    "surprisal": evaluation(case, params, signal="surprisal"),
    "surprisal, top layer": evaluation(case, params, signal="surprisal", layers="top"),
    "PyTorch plain": peer.evaluation(recode=False),
    "PyTorch surprisal": peer.evaluation(recode=True),
  }
  seconds = report.measure("evaluation", runs, ROUNDS, amount=case.tokens, unit="tokens")
  plain, theirs = seconds["plain"], seconds["PyTorch plain"]
  most = 3.0 if report.options.device == "gpu" else 1.85
  report.claim("evaluation: surprisal / plain", seconds["surprisal"], plain, at_most=most)
  name = "surprisal, top layer"
  report.claim(f"evaluation: {name} / plain", seconds[name], plain)
  report.claim("evaluation: PyTorch surprisal / plain", seconds["PyTorch surprisal"], theirs)
  report.claim("evaluation: ours / PyTorch, plain", plain, theirs, at_most=0.8)


def compare_wide_evaluation(report: common.Report, case: Case, params: Any) -> None:
  """Losses of a stretch of four times as many streams."""
  wide = dataclasses.replace(case, rows=4 * case.rows)
  runs = {"plain": evaluation(wide, params)}
  runs["surprisal"] = evaluation(wide, params, signal="surprisal")
  name = f"evaluation, {wide.rows} streams"
  seconds = report.measure(name, runs, ROUNDS, amount=wide.tokens, unit="tokens")
  most = {} if report.options.device == "gpu" else {"at_most": 1.66}
  report.claim(f"{name}: surprisal / plain", seconds["surprisal"], seconds["plain"], **most)


def compare_entropies(report: common.Report, case: Case, params: Any) -> None:
  """Losses of a stretch where the entropy of several samples is lowered."""
  runs = {"plain": evaluation(case, params)}
  for k in SAMPLES:
    how = {"signal": "entropy"} if k == 1 else {"signal": "mc_dropout", "samples": k}
    runs[f"entropy of {k}"] = evaluation(case, params, **how)
  seconds = report.measure("entropy", runs, ROUNDS, amount=case.tokens, unit="tokens")
  for k in SAMPLES:
    name = f"entropy of {k}"
    # The target leaves the prediction's product out; with few samples it is below the floor.
    floor = (17 + 26 * k) / 26.5
    most = round((1.5 if report.options.device == "gpu" else 1.3) * floor, 2)
    report.claim(f"evaluation: {name} / plain", seconds[name], seconds["plain"], at_most=most)


def compare_training(report: common.Report, case: Case, params: Any, peer: Peer) -> None:
  """Training steps, with recoding and without, by both."""
  runs = {
    "plain": training(case, params),
    "surprisal": training(case, params, signal="surprisal"),
    "surprisal, through": training(case, params, signal="surprisal", through=True),
    "PyTorch plain": peer.training(peer.plain_loss),
    "PyTorch surprisal": peer.training(peer.recoded_loss),
  }
  seconds = report.measure("training", runs, ROUNDS, amount=case.tokens, unit="tokens")
  plain, theirs = seconds["plain"], seconds["PyTorch plain"]
  gpu = report.options.device == "gpu"
  limits = {"surprisal": 2.0 if gpu else 1.08, "surprisal, through": 2.5 if gpu else 1.65}
  for name, most in limits.items():
    report.claim(f"training: {name} / plain", seconds[name], plain, at_most=most)
  report.claim("training: PyTorch surprisal / plain", seconds["PyTorch surprisal"], theirs)
  report.claim("training: ours / PyTorch, plain", plain, theirs, at_most=0.72)


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
